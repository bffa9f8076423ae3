"""Lets all ranks of a server agree on transfers: one ends when it has ended on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from sylvan.kernels.api import Communicator
from sylvan.runtime.executor.rank_bytes import all_gather_bytes
from sylvan.runtime.features.disagg.work import (
    DecodeEvents,
    LeaveDone,
    PagesRequested,
    PrefillEvents,
    Progress,
    Received,
    Refused,
    SendingEnded,
    Sent,
    TransferFailed,
)

Ended = SendingEnded | Received | Refused | TransferFailed | LeaveDone
_WORST = (Refused, TransferFailed, LeaveDone)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Ended | Sent, ...])
Events = PrefillEvents | DecodeEvents


class Agreement:
    """Withholds the end of a transfer until all ranks have seen it, and sums up what they send.

    Each rank transfers the pages of its own heads over its own connection. If one rank fails, the
    others give up too.

    Args:
        ranks: All ranks of this server.
        give_up: Ends a job on this rank; its end event follows.
    """

    def __init__(self, ranks: Communicator, give_up: Callable[[int], None]) -> None:
        self._ranks, self._give_up = ranks, give_up
        self._ended: dict[int, dict[int, Ended]] = {}  # by job, by rank

    def agree(self, events: Events | None) -> Events | None:
        """Return the events that all ranks agree on, given this rank's new ones; None: none.

        Collective: all ranks call it in the same steps.

        Raises:
            RankLostError: Another rank has exited or is late.
        """
        found: list[PagesRequested | Progress | Sent] = [
            event for event in events or () if not isinstance(event, Ended | Sent)
        ]
        mine = tuple(event for event in events or () if isinstance(event, Ended | Sent))
        for rank, some in enumerate(self._exchange(mine)):
            for event in some:
                if isinstance(event, Sent):
                    found.append(event)
                else:
                    self._ended.setdefault(event.job, {})[rank] = event
        over = [job for job, by_rank in self._ended.items() if len(by_rank) == self._ranks.size]
        ends = tuple(_combined([*self._ended.pop(job).values()]) for job in over)
        for job, by_rank in self._ended.items():
            if self._ranks.rank not in by_rank and any(map(_has_failed, by_rank.values())):
                self._give_up(job)
        return cast(Events, (*found, *ends)) or None

    def _exchange(self, mine: tuple[Ended | Sent, ...]) -> Sequence[tuple[Ended | Sent, ...]]:
        """Exchange the reports of all ranks."""
        data = _encoder.encode(mine) if mine else b""
        each = all_gather_bytes(self._ranks, data)
        return [_decoder.decode(received) if received else () for received in each]


def _has_failed(event: Ended) -> bool:
    return bool(event.error) if isinstance(event, SendingEnded) else not isinstance(event, Received)


def _combined(events: Sequence[Ended]) -> Ended:
    """Return how a job ended on all ranks together."""
    received = [event for event in events if isinstance(event, Received)]
    if len(received) == len(events):
        return Received(
            received[0].job,
            sum(event.num_bytes for event in received),
            max(event.seconds for event in received),
        )
    for kind in _WORST:
        if (worst := next((e for e in events if isinstance(e, kind)), None)) is not None:
            return worst
    return next((event for event in events if _has_failed(event)), events[0])
