"""Work of tiers has ended when it has ended on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from sylvan.kernels.collective.reference import thread_ranks
from sylvan.runtime.features.tiers.rank_agreement import TierAgreement, suffix_of
from sylvan.runtime.features.tiers.work import (
    Attached,
    Cleared,
    Exported,
    Fetched,
    Loaded,
    Persisted,
    Saved,
)
from tests.support.ranks import in_threads


class Ranks:
    """Two of them, which agree in turn."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self._all = [
            TierAgreement(rank, lambda rank=rank: self.closed.append(rank.rank))
            for rank in thread_ranks(2)
        ]

    def agree(self, first: tuple[Any, ...] = (), second: tuple[Any, ...] = ()) -> Any:
        """The messages to the ranks, which are equal."""
        given = (first or None, second or None)
        calls = [
            lambda a=agreement, g=events: a.agree(g)
            for agreement, events in zip(self._all, given, strict=True)
        ]
        one, other = in_threads(calls)
        assert one == other
        return one


def test_what_both_have_done_is_done():
    ranks = Ranks()
    assert ranks.agree() is None
    assert ranks.agree((Saved(1, True, 10, 0.5), Exported(2, True))) is None
    assert ranks.agree((), (Exported(2, True),)) == (Exported(2, True),)
    assert ranks.agree((), (Saved(1, True, 10, 0.25),)) == (Saved(1, True, 20, 0.5),)


@pytest.mark.parametrize("kind", [Saved, Exported])
def test_what_one_could_not_copy_is_not_there(kind):
    assert Ranks().agree((kind(1, True),), (kind(1, False),)) == (kind(1, False),)


def test_a_page_is_stored_where_both_have_stored_it():
    found = Ranks().agree(
        (Persisted(1, 3, 30, 0.5, ("a",)),), (Persisted(1, 2, 20, 0.75, ("b", "a"), "it is full"),)
    )
    assert found == (Persisted(1, 2, 50, 0.75, ("a", "b"), "it is full"),)


def test_a_fetch_is_as_far_as_the_slower_one():
    ranks = Ranks()
    assert ranks.agree((Fetched(1, 8, 4, False, num_bytes=40),)) is None
    assert ranks.agree((), (Fetched(1, 8, 2, False, num_bytes=20),)) == (
        Fetched(1, 8, 2, False, num_bytes=60),
    )
    done = Fetched(1, 8, 8, True, num_bytes=80, seconds=0.5)
    assert ranks.agree((done,)) == (Fetched(1, 8, 2, False, num_bytes=100, seconds=0.5),)
    less = Fetched(1, 6, 6, True, num_bytes=60, seconds=0.25, faults={"torn": 1}, error="x")
    assert ranks.agree((), (less,)) == (
        Fetched(1, 6, 6, True, num_bytes=140, seconds=0.5, faults={"torn": 1}, error="x"),
    )
    assert ranks.agree() is None


def test_windows_and_states_must_end_alike():
    ranks = Ranks()
    one = Fetched(1, 8, 8, True, windows=(6,), state=True)
    other = Fetched(1, 8, 8, True, windows=(7,), state=True)
    assert ranks.agree((one,), (other,)) == (Fetched(1, 8, 8, True, windows=(7,), state=True),)
    shorter = Fetched(2, 4, 4, True, windows=(3,), state=True)
    longer = Fetched(2, 8, 8, True, windows=(6,), state=True)
    assert ranks.agree((shorter,), (longer,)) == (Fetched(2, 0, 0, True),)


def test_a_load_has_failed_where_it_failed_on_one():
    ranks = Ranks()
    ok = Loaded(1, "ok", 20, 10, 0.5, 0.25)
    assert ranks.agree((ok,), (ok,)) == (Loaded(1, "ok", 40, 20, 0.5, 0.25),)
    failed = Loaded(1, "failed", faults={"torn": 1}, error="gone")
    cancelled = Loaded(1, "cancelled", error="it took too long")
    assert ranks.agree((cancelled,), (failed,)) == (failed,)
    assert ranks.agree((ok,), (cancelled,)) == (cancelled,)


def test_a_store_that_one_cannot_open_is_used_by_none():
    ranks = Ranks()
    failed = Attached("redis://x", "it is out of reach", 503)
    assert ranks.agree((Attached("redis://x"),), (failed,)) == (failed,)
    assert sorted(ranks.closed) == [0, 1]
    assert ranks.agree((Attached("a"), Attached("a")), (Attached("a"),)) == (Attached("a"),)
    assert ranks.agree((), (Attached("a"), Cleared())) == (Attached("a"),)
    assert ranks.agree((Cleared("full"),)) == (Cleared("full"),)
    assert sorted(ranks.closed) == [0, 1]


def test_names_of_ranks_differ():
    assert [suffix_of(rank) for rank in thread_ranks(2)] == ["r0", "r1"]
    assert suffix_of(thread_ranks(1)[0]) == ""
