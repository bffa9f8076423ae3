"""A transfer of several ranks is over when it is over on all of them."""

from __future__ import annotations

from typing import Any

import pytest

from sylvan.kernels.collective.reference import thread_ranks
from sylvan.runtime.features.disagg.rank_agreement import Agreement
from sylvan.runtime.features.disagg.work import (
    LeaveDone,
    PagesRequested,
    Progress,
    Received,
    Refused,
    SendingEnded,
    Sent,
    TransferFailed,
)
from tests.support.ranks import in_threads


class Ranks:
    """Two of them, which agree in turn."""

    def __init__(self) -> None:
        self.left: list[list[int]] = [[], []]
        ranks = thread_ranks(2)
        self._all = [Agreement(r, self.left[i].append) for i, r in enumerate(ranks)]

    def agree(self, first: tuple[Any, ...] = (), second: tuple[Any, ...] = ()) -> Any:
        """The first rank's report."""
        given = (first or None, second or None)
        calls = [
            lambda a=agreement, g=events: a.agree(g)
            for agreement, events in zip(self._all, given, strict=True)
        ]
        return in_threads(calls)[0]


def test_what_both_have_received_is_received():
    ranks = Ranks()
    assert ranks.agree((Progress(1),), (Progress(1),)) == (Progress(1),)
    assert ranks.agree((Received(1, 100, 0.5),)) is None
    assert ranks.agree() is None
    assert ranks.agree((Progress(2),), (Received(1, 60, 0.75),)) == (
        Progress(2),
        Received(1, 160, 0.75),
    )
    assert ranks.left == [[], []]


def test_what_was_sent_is_over_once_both_say_so():
    ranks = Ranks()
    assert ranks.agree(
        (PagesRequested(3, 0), Sent(3, 5)), (PagesRequested(3, 0), Sent(3, 6), SendingEnded(3))
    ) == (
        PagesRequested(3, 0),
        Sent(3, 5),
        Sent(3, 6),
    )
    assert ranks.agree((SendingEnded(3),)) == (SendingEnded(3),)


@pytest.mark.parametrize(
    "failed", [TransferFailed(1, "broke"), Refused(1, "other weights"), SendingEnded(1, "late")]
)
def test_where_one_fails_the_other_gives_up(failed):
    ranks = Ranks()
    assert ranks.agree((), (failed,)) is None
    assert ranks.left == [[1], []]
    assert ranks.agree(
        (LeaveDone(1) if not isinstance(failed, SendingEnded) else SendingEnded(1),)
    ) == (failed,)


def test_what_had_come_already_does_not_save_it():
    ranks = Ranks()
    assert ranks.agree((Received(1, 10, 0.1),), (TransferFailed(1, "broke"),)) == (
        TransferFailed(1, "broke"),
    )
    assert ranks.left == [[], []]


def test_many_jobs_and_long_reasons():
    ranks = Ranks()
    reasons = [f"{i} " + "because " * 50 for i in range(40)]
    lost = tuple(TransferFailed(i, reason) for i, reason in enumerate(reasons))
    assert ranks.agree(lost, tuple(Received(i, 1, 0.0) for i in range(40))) == lost
