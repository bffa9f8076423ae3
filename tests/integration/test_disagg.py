"""A prefill and a decode server: answers are those of one server, whatever layers keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sylvan.protocol.requests import Bootstrap
from tests.support.roles import KINDS, Pair, Server, prompt, same, write_kind


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_kind(folder / kind.replace(" ", "-"), kind) for kind in KINDS}


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for server in found:
        server.close()


LENGTHS = (1, 2, 15, 16, 17, 33, 48, 63, 64, 65, 100, 129, 200, 301)


def answers(ask: Any, tokens: Any, run: Any) -> dict[str, list[int]]:
    """Prompts of many lengths, some of which share a start; then all of them again."""
    names: list[str] = []
    for turn in range(2):
        for length in LENGTHS:
            names.append(f"{turn}-{length}")
            ask(names[-1], prompt(length, length))
            names.append(f"{turn}-{length}-shared")
            ask(names[-1], [*prompt(301, 301)[: length // 2], *prompt(length, 99 + turn)])
        run()
    return {name: tokens(name) for name in names}


@pytest.mark.parametrize("transfer", ["tcp", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_server(opened, models, kind, transfer):
    alone = Server(models[kind])
    pair = Pair(models[kind], disagg__transfer=transfer)
    opened += [alone, pair]

    def run_alone() -> None:
        while not alone.scheduler.idle:
            alone.step()

    expected = answers(alone.add, alone.tokens, run_alone)
    found = answers(pair.ask, pair.decode.tokens, pair.run)

    assert found == expected
    state = pair.decode.state()
    assert state["failed"] == state["refused"] == 0
    assert state["done"] == 2 * 2 * len(LENGTHS)
    assert state["num_bytes"] > 0
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
def test_kv_goes_through_the_store_that_both_have(opened, models, kind, tmp_path):
    store = {"tiers__storage": str(tmp_path / "store"), "tiers__prefetch_min_tokens": 1}
    alone = Server(models[kind])
    pair = Pair(models[kind], disagg__transfer="store", **store)
    opened += [alone, pair]
    prompts = {f"r{length}": prompt(length, length) for length in (3, 40, 129, 300)}
    for name, ids in prompts.items():
        alone.add(name, ids)
        pair.ask(name, ids)
    while not alone.scheduler.idle:
        alone.step()
    pair.run()

    for name in prompts:
        assert pair.decode.tokens(name) == alone.tokens(name)
    state = pair.decode.state()
    assert (state["done"], state["failed"], state["num_bytes"]) == (4, 0, 0)
    loaded = [o.usage.loaded_tokens for o in pair.decode.outputs if o.rid == "r300"]
    assert max(loaded) >= 288
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


def test_tiers_beside_a_role_serve_what_no_prefill_server_brings(opened, models, tmp_path):
    alone = Server(models["full"])
    stores = {f"{side}_tiers__storage": str(tmp_path / side) for side in ("p", "d")} | {
        "tiers__prefetch_min_tokens": 1
    }
    pair = Pair(models["full"], **stores)
    opened += [alone, pair]
    for turn in range(3):
        for length in (40, 129, 300):
            name, ids = f"{turn}-{length}", prompt(length, length)
            alone.add(name, ids)
            if turn < 2:
                pair.ask(name, ids)
            else:
                pair.decode.add(name, ids)
        while not alone.scheduler.idle:
            alone.step()
        pair.run()
        pair.prefill.scheduler.flush_cache()
        pair.decode.scheduler.flush_cache()

    for turn in range(3):
        for length in (40, 129, 300):
            name = f"{turn}-{length}"
            assert pair.decode.tokens(name) == alone.tokens(name)
    assert pair.decode.state()["failed"] == 0
    assert max(o.usage.loaded_tokens for o in pair.decode.outputs if o.rid == "2-300") >= 288
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


def test_roles_are_those_of_requests_where_both_are_there(opened, models):
    """As after a switch: each server does either part, even at the same time."""
    alone = Server(models["full"])
    pair = Pair(models["full"], disagg__switchable=True, d_disagg__bootstrap_port=0)
    opened += [alone, pair]
    ports = pair.prefill.state()["bootstrap_port"], pair.decode.state()["bootstrap_port"]
    assert all(ports)
    sides = pair.prefill, pair.decode
    for number in range(12):
        ids, first = prompt(60 + 17 * number, number), number % 2
        meeting = Bootstrap(host="127.0.0.1", port=ports[first], room=1000 + number)
        name = str(number)
        alone.add(name, ids)
        sides[first].add(name, ids, same(meeting, role="prefill"), max_new_tokens=1)
        sides[1 - first].add(name, ids, same(meeting, role="decode"))
    while not alone.scheduler.idle:
        alone.step()
    pair.run()

    for number in range(12):
        assert sides[1 - number % 2].tokens(str(number)) == alone.tokens(str(number))
    for side in sides:
        assert side.state()["failed"] == side.state()["refused"] == 0
        assert side.is_clean()
