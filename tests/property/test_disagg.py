"""Faults at random times: each request is answered as by one server, and no page is lost."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sylvan.runtime.engine import build
from sylvan.runtime.features.disagg.build import DisaggParts
from tests.support.prefill_decode import Pair, Server, prompt, write_kind
from tests.support.transfer import Faults, FaultyNetwork

LENGTHS = (5, 40, 100, 170)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_kind(tmp_path_factory.mktemp("models") / "full", "full")


class Faulty:
    """A pair whose network does what `faults` says at the time."""

    def __init__(self, model: str, **options: Any) -> None:
        self.faults = Faults()
        original = build.DisaggParts
        build.DisaggParts = functools.partial(  # type: ignore[misc]
            DisaggParts, network=lambda: FaultyNetwork(self.faults)
        )
        try:
            self.pair = Pair(model, disagg__timeout_s=0.5, **options)
        finally:
            build.DisaggParts = original  # type: ignore[misc]

    def now(self, **changes: Any) -> None:
        """From now on other things go wrong."""
        for name in ("lost", "broken", "late", "swapped", "garbled", "sent"):
            setattr(self.faults, name, 0)
        self.faults.breaks_at = None
        for name, value in changes.items():
            setattr(self.faults, name, value)


@pytest.fixture(scope="module")
def faulty(model):
    found = Faulty(model)
    yield found
    found.pair.close()


@pytest.fixture(scope="module")
def expected(model) -> dict[int, list[int]]:
    alone = Server(model)
    for length in LENGTHS:
        alone.add(str(length), prompt(length, length))
    while not alone.scheduler.idle:
        alone.step()
    found = {length: alone.tokens(str(length)) for length in LENGTHS}
    alone.close()
    return found


COUNT = iter(range(10**9))


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    breaks_at=st.integers(0, 9),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3),
    aborts=st.sampled_from(["", "", "prefill", "decode"]),
    after=st.integers(0, 6),
    fresh=st.booleans(),
)
def test_a_connection_that_breaks_at_any_message(
    faulty, expected, breaks_at, lengths, aborts, after, fresh
):
    pair = faulty.pair
    faulty.now(breaks_at=breaks_at)
    if fresh:
        pair.prefill.scheduler.flush_cache()
        pair.decode.scheduler.flush_cache()
    asked = [(f"r{next(COUNT)}", length) for length in lengths]
    for rid, length in asked:
        pair.ask(rid, prompt(length, length))
    for _ in range(after):
        pair.prefill.step()
        pair.decode.step()
    if aborts:
        getattr(pair, aborts).scheduler.abort(asked[0][0])

    pair.run()

    for rid, length in asked:
        if aborts == "decode" and rid == asked[0][0]:
            continue
        assert pair.decode.tokens(rid) == expected[length]
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


@pytest.mark.slow
@pytest.mark.parametrize("fallback", ["local", "error"])
def test_a_thousand_requests_with_a_tenth_of_transfers_failing(model, expected, fallback):
    faulty = Faulty(model, disagg__fallback=fallback)
    pair = faulty.pair
    faulty.now(broken=0.02)  # of five or six messages each
    try:
        for turn in range(20):
            asked = [(f"{turn}-{i}", LENGTHS[i % len(LENGTHS)]) for i in range(50)]
            pair.decode.scheduler.flush_cache()
            for rid, length in asked:
                pair.ask(rid, prompt(length, length))
            pair.run()
            for rid, length in asked:
                finish = pair.decode.finish(rid)
                assert finish is not None
                if finish.type == "abort":
                    assert fallback == "error"
                    assert finish.status == 503
                    assert "disaggregated prefill failed" in (finish.message or "")
                else:
                    assert pair.decode.tokens(rid) == expected[length]
            assert pair.prefill.is_clean()
            assert pair.decode.is_clean()
            pair.prefill.outputs.clear()
            pair.decode.outputs.clear()
        state = pair.decode.state()
        assert 50 <= state["failed"] <= 300
        assert state["done"] + state["failed"] == 1000
    finally:
        pair.close()
