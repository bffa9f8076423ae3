"""Lets all ranks of a server agree on their work: it has ended when it has ended on each of them.

Each rank keeps and stores the pages of its own heads. The control half sees one report for all: a
page is there if it is there on every rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from sylvan.kernels.api import Communicator
from sylvan.runtime.executor.rank_bytes import all_gather_bytes
from sylvan.runtime.features.tiers.work import (
    Attached,
    Cleared,
    Event,
    Events,
    Exported,
    Fetched,
    Loaded,
    Persisted,
    Saved,
)
from sylvan.runtime.storage.record import Fault

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Events)
_Key = tuple[type[Event], Any]


class TierAgreement:
    """Combines the reports of all ranks.

    Args:
        ranks: All ranks of this server.
        close_store: Called on every rank if a store could be opened on some of them only.
    """

    def __init__(self, ranks: Communicator, close_store: Callable[[], None]) -> None:
        self._ranks, self._close_store = ranks, close_store
        self._fetches: dict[int, dict[int, Fetched]] = {}  # last reports by job and rank
        self._ended: dict[_Key, tuple[deque[Event], ...]] = {}  # reports by kind and job, by rank

    def agree(self, events: Events | None) -> Events | None:
        """Return what has happened on all ranks, given this rank's new events; None: nothing.

        Collective: all ranks call it in the same steps.

        Raises:
            RankLostError: Another rank has exited or is late.
        """
        data = _encoder.encode(events) if events else b""
        fetches: dict[int, None] = {}
        for rank, received in enumerate(all_gather_bytes(self._ranks, data)):
            for event in _decoder.decode(received) if received else ():
                if isinstance(event, Fetched):
                    self._fetches.setdefault(event.job, {})[rank] = event
                    fetches[event.job] = None
                else:
                    queues = self._ended.setdefault(_key(event), self._queues())
                    queues[rank].append(event)
        return (*self._progress(fetches), *self._ends()) or None

    def _queues(self) -> tuple[deque[Event], ...]:
        return tuple(deque[Event]() for _ in range(self._ranks.size))

    def _progress(self, jobs: dict[int, None]) -> list[Event]:
        """Return the progress of fetches that all ranks have reported."""
        found: list[Event] = []
        for job in jobs:
            by_rank = self._fetches[job]
            if len(by_rank) < self._ranks.size:
                continue
            event = _fetched([by_rank[rank] for rank in sorted(by_rank)])
            found.append(event)
            if event.done:
                del self._fetches[job]
        return found

    def _ends(self) -> list[Event]:
        found: list[Event] = []
        for key, queues in [*self._ended.items()]:
            while all(queues):
                event = _combined([queue.popleft() for queue in queues])
                if isinstance(event, Attached) and event.error:
                    self._close_store()
                found.append(event)
            if not any(queues):
                del self._ended[key]
        return found


def suffix_of(ranks: Communicator) -> str:
    """Return what the names of a rank's own pages end in; empty: there is one rank."""
    return f"r{ranks.rank}" if ranks.size > 1 else ""


def _key(event: Event) -> _Key:
    match event:
        case Attached():
            return Attached, event.url
        case Cleared():
            return Cleared, None
        case _:
            return type(event), event.job


def _fetched(each: Sequence[Fetched]) -> Fetched:
    """Return the progress of the rank that has the least.

    Windows and states belong to the end of what was found; ranks that found different ends have
    found nothing together.
    """
    ends = {event.found for event in each}
    if len(ends) > 1 and any(event.windows or event.state for event in each):
        each = [
            msgspec.structs.replace(event, found=0, arrived=0, windows=(), state=False)
            for event in each
        ]
    windows = [event.windows for event in each]
    return Fetched(
        each[0].job,
        min(event.found for event in each),
        min(event.arrived for event in each),
        all(event.done for event in each),
        tuple(map(max, zip(*windows, strict=True))),
        all(event.state for event in each),
        sum(event.num_bytes for event in each),
        max(event.seconds for event in each),
        _faults(each),
        _error(each),
        any(event.stopped for event in each),
    )


def _combined(each: Sequence[Event]) -> Event:
    """Return how something ended on all ranks together."""
    match each[0]:
        case Saved():
            return _saved(cast("Sequence[Saved]", each))
        case Exported(job=job):
            exports = cast("Sequence[Exported]", each)
            return Exported(job, all(event.ok for event in exports))
        case Persisted():
            return _persisted(cast("Sequence[Persisted]", each))
        case Loaded():
            return _loaded(cast("Sequence[Loaded]", each))
        case Attached() | Cleared():
            ends = cast("Sequence[Attached | Cleared]", each)
            return next((event for event in ends if event.error), each[0])
        case Fetched():
            raise AssertionError("fetches report progress")


def _saved(each: Sequence[Saved]) -> Saved:
    return Saved(
        each[0].job,
        all(event.ok for event in each),
        sum(event.num_bytes for event in each),
        max(event.seconds for event in each),
    )


def _persisted(each: Sequence[Persisted]) -> Persisted:
    lost = {name: None for event in each for name in event.lost}
    return Persisted(
        each[0].job,
        min(event.num_pages for event in each),
        sum(event.num_bytes for event in each),
        max(event.seconds for event in each),
        tuple(sorted(lost)),
        _error(each),
    )


def _loaded(each: Sequence[Loaded]) -> Loaded:
    """Return the outcome of the rank with the worst one."""
    wrong = [event for event in each if event.outcome != "ok"]
    if wrong:
        worst = next((event for event in wrong if event.outcome == "failed"), wrong[0])
        return msgspec.structs.replace(worst, faults=_faults(each))
    return Loaded(
        each[0].job,
        "ok",
        sum(event.num_bytes for event in each),
        sum(event.saved_bytes for event in each),
        max(event.seconds for event in each),
        max(event.saved_seconds for event in each),
        _faults(each),
    )


def _faults(each: Sequence[Fetched | Loaded]) -> dict[Fault, int]:
    total: Counter[Fault] = Counter()
    for event in each:
        total.update(event.faults)
    return dict(total)


def _error(each: Sequence[Fetched | Persisted]) -> str:
    return next((event.error for event in each if event.error), "")
