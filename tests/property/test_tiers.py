"""The whole scheduler over a store that delays, reorders, loses, spoils and fills up.

The oracle is that of the scheduler without one: every request brings what it brings alone.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from sylvan.protocol.tiers import AttachStore, ClearStore, DetachStore
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.storage.api import StoreError, StoreLimits
from tests.support.cache_events import follow
from tests.support.kv_store import StoreBelow
from tests.support.scheduler_inputs import setups
from tests.support.scheduler_machine import SchedulerMachine

NAMES = (f"machine-{n}" for n in itertools.count())
FAULTS = ["none", "none", "lose", "tear", "flip", "swap", "fail"]


def prefetch_policies() -> st.SearchStrategy[PrefetchPolicy]:
    return st.builds(
        PrefetchPolicy,
        wait=st.sampled_from(["wait_complete", "timeout", "best_effort"]),
        min_tokens=st.sampled_from([1, 1, 8]),
        timeout_s=st.sampled_from([0.0, 0.05, 1.0]),
        longest_s=st.sampled_from([0.1, 5.0]),
    )


def stores() -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(
        {
            "write_policy": st.sampled_from(
                ["write_through", "write_through", "write_back", "write_through_selective"]
            ),
            "prefetch": prefetch_policies(),
            "max_known": st.sampled_from([1000, 40, 7]),
            "max_pending_bytes": st.sampled_from([1 << 20, 500]),
            "max_staged_bytes": st.sampled_from([1 << 20, 300]),
            "limits": st.sampled_from([StoreLimits(), StoreLimits(max_bytes=3000)]),
            "host_pages": st.sampled_from([0, 0, 60, 25, 5]),
            "attached": st.sampled_from([True, True, True, False]),
        }
    )


class Tiers(SchedulerMachine):
    """For all behaviours of the store."""

    @initialize(
        setup=setups(states=st.sampled_from([0, 0, 12])),
        windows=st.sampled_from([(), (), (8,), (3, 17)]),
        store=stores(),
    )
    def begin(self, setup, windows, store):
        self.below = StoreBelow(next(NAMES), **store)
        self.seen: list[bytes] = []
        setup |= {"prefix": True, "tiers": self.below}
        if windows:
            setup |= {"windows": windows, "window_pages": 30}
        self.start(setup)
        self.world.tree.record_events()
        self.below.store.spoil = self.spoil
        self.below.store.fault = self.fail
        self.faults = "none"
        self.quick = True

    # ---- the store

    @rule(kind=st.sampled_from(FAULTS))
    def misbehave(self, kind: str) -> None:
        self.faults = kind

    @rule(quick=st.booleans())
    def slow_down(self, quick: bool) -> None:
        self.quick = quick

    @rule(copies=st.integers(0, 3), calls=st.integers(0, 8), which=st.integers(0, 20))
    def work(self, copies: int, calls: int, which: int) -> None:
        """In any order."""
        for _ in range(copies):
            self.below.copies.run(which)
        for _ in range(calls):
            self.below.calls.run(which)

    @rule(command=st.sampled_from([ClearStore(), DetachStore(), AttachStore(url="")]))
    def operate(self, command) -> None:
        if isinstance(command, AttachStore):
            command = AttachStore(url=self.below.url, write_policy="write_through")
        self.below.stores.add(next(self.numbers), command)
        self.below.stores.take_replies()

    @rule()
    def flush_cache(self) -> None:
        """Pages that a load was given stay reserved until it has ended."""
        self.scheduler.flush_cache()
        self.check()

    @rule()
    def forget_kv(self) -> None:
        """As when weights are replaced, which waits for loads."""
        if self.scheduler.holds_kv or self.world.cache.loads.running:
            return
        self.below.copies.run()  # a copy of what is to be spoilt may be under way
        super().forget_kv()
        self.below.stores.weights_changed()

    def run_step(self) -> None:
        super().run_step()
        if self.quick:
            self.below.work()
        self.below.stores.take_replies()

    def teardown(self) -> None:
        if not getattr(self, "sound", False):
            return
        self.quick = True
        super().teardown()
        self.check_store()

    numbers = itertools.count(1)

    def fail(self, method: str, name: str) -> None:
        if self.faults == "fail" and method not in ("clear", "remove"):
            raise StoreError("broken")

    def spoil(self, name: str, record: bytes) -> bytes | None:
        self.seen = [*self.seen[-20:], record]
        match self.faults:
            case "lose":
                return None
            case "tear":
                return record[: len(record) // 2]
            case "flip":
                at = len(self.seen) % len(record)
                return record[:at] + bytes([record[at] ^ 4]) + record[at + 1 :]
            case "swap":
                return self.seen[0]
            case _:
                return record

    def check_store(self) -> None:
        """Nothing is on its way any more, and the tree, the tiers and routers agree."""
        known = follow(self.world.tree.take_events(), self.world.tree.page_size, {})
        assert not any(known.values())
        tier = self.below.tier
        assert not tier.writing
        assert tier.pending_bytes == 0
        assert not tier.known, "the tree was cleared, so it knows nothing"
        if (host := self.below.host) is not None:
            assert not host.is_writing
            assert host.used_pages == 0
            assert [len(free) for free in host._free] == [*host.slots]
        assert not self.below.control._prefetches


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


@pytest.mark.slow
class TestTiersAtLength(Tiers.TestCase):
    settings = settings(
        max_examples=200, stateful_step_count=40, deadline=None, report_multiple_bugs=False
    )
