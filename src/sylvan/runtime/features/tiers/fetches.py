"""Reads pages of prefixes from the store into host memory, many concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.features.tiers.lookup import Found, look_up
from sylvan.runtime.features.tiers.opened import OpenedStore
from sylvan.runtime.features.tiers.staging import Staging
from sylvan.runtime.features.tiers.threads import Threads
from sylvan.runtime.features.tiers.work import Fetch, Fetched
from sylvan.runtime.storage.api import StoreError
from sylvan.runtime.storage.record import Fault, RecordError
from sylvan.utils.clock import Clock, monotonic

MIN_CALLS = 4  # calls among which the pages of one fetch are split, if there are enough
CALL_BYTES = 4 << 20  # limit of one call, unless a page is larger
Buffer = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _FetchState:
    """A fetch; `ends_at` is the index of the first unavailable page."""

    fetch: Fetch
    began_s: float
    found: Found | None = None
    buffers: dict[int, Buffer] = field(default_factory=dict[int, Buffer])  # by group
    rows: list[int] = field(default_factory=list[int])  # of each page in its group's buffer
    arrived: list[bool] = field(default_factory=list[bool])
    index: dict[str, int] = field(default_factory=dict[str, int])  # pages by name
    leading: int = 0
    ends_at: int = 0
    reserved: int = 0
    num_bytes: int = 0
    faults: dict[Fault, int] = field(default_factory=dict[Fault, int])
    error: str = ""
    over: bool = False
    stopped: bool = False
    changed: bool = False
    reported_s: float = float("-inf")

    def row(self, at: int) -> Buffer:
        """Return the buffer of page `at`."""
        assert self.found is not None
        return self.buffers[self.found.groups[at]][self.rows[at]]


class Fetches:
    """All fetches in progress, and their results until released.

    Args:
        staging: Buffers to read into.
        groups: KV groups of the model.
        threads: Reader threads.
        max_bytes: Host memory limit; a fetch that exceeds it is truncated.
        report_s: Shortest interval between progress reports of a fetch.
    """

    def __init__(
        self,
        staging: Staging,
        groups: Sequence[KVGroup],
        threads: Threads,
        max_bytes: int,
        clock: Clock = monotonic,
        *,
        report_s: float = 0.0,
    ) -> None:
        self._staging, self._groups = staging, tuple(groups)
        self._page_bytes = staging.page_bytes
        self._threads, self._max_bytes, self._clock = threads, max_bytes, clock
        self._report_s = report_s
        self._plain = all(group.kind in ("full", "latent") for group in groups)
        self._jobs: dict[int, _FetchState] = {}
        self._ended: list[_FetchState] = []  # released before they were reported
        self._reserved = 0
        self._lock = threading.Lock()

    def begin(self, fetch: Fetch, store: OpenedStore | None) -> None:
        """Start looking up and reading; without a store, nothing is found."""
        job = _FetchState(fetch, self._clock())
        with self._lock:
            self._jobs[fetch.job] = job
            if store is None:
                self._end(job, "no store is attached")
                return
        self._threads.submit(lambda: self._look_up(job, store))

    def stop(self, number: int) -> None:
        """Stop reading for a fetch; what has arrived stays."""
        with self._lock:
            if (job := self._jobs.get(number)) is not None:
                self._stop(job)

    def release(self, number: int) -> None:
        """Free the pages of a fetch."""
        with self._lock:
            job = self._jobs.pop(number, None)
            if job is None:
                return
            self._stop(job)
            if job.changed:
                self._ended.append(job)
            self._reserved -= job.reserved
            job.reserved = 0

    def stop_all(self) -> None:
        """Stop all fetches: the store is closing."""
        with self._lock:
            for job in self._jobs.values():
                self._stop(job)

    def payload(self, name: str) -> Buffer | None:
        """Return the bytes of a fetched page."""
        with self._lock:
            for job in self._jobs.values():
                at = job.index.get(name)
                if at is not None and job.arrived[at]:
                    return job.row(at)
        return None

    def run_of(self, names: Sequence[str]) -> Buffer | None:
        """Return the bytes of pages that are adjacent in one fetch's buffer; None if not adjacent.

        They are no longer written, and stay valid while they are referenced.
        """
        with self._lock:
            for job in self._jobs.values():
                if (first := job.index.get(names[0])) is not None:
                    return self._run_in(job, first, names)
        return None

    def events(self) -> list[Fetched]:
        """Return the progress since the last call."""
        now = self._clock()
        with self._lock:
            changed = (job for job in self._jobs.values() if job.changed)
            jobs = [j for j in changed if j.over or now - j.reported_s >= self._report_s]
            jobs, self._ended = [*self._ended, *jobs], []
            for job in jobs:
                job.changed, job.reported_s = False, now
            return [self._event(job) for job in jobs]

    # ---- private; docstrings say which methods need the lock

    def _look_up(self, job: _FetchState, store: OpenedStore) -> None:
        if job.over:
            return
        try:
            found = look_up(store, job.fetch, self._groups)
        except StoreError as error:
            with self._lock:
                self._end(job, str(error))
            return
        with self._lock:
            if job.over:
                return
            found = self._reserve(job, found)
            job.found, job.ends_at = found, len(found.names)
            job.arrived = [False] * len(found.names)
            job.index = {name: at for at, name in enumerate(found.names)}
            job.changed = True
            if not found.names:
                self._end(job)
                return
            self._allocate(job, found)
        each = self._pages_of_call(job, found)
        for start in range(0, len(found.names), each):
            self._threads.submit(
                self._reader(job, found, range(start, min(start + each, len(found.names))), store)
            )

    def _reserve(self, job: _FetchState, found: Found) -> Found:
        """Truncate a prefix to the host memory limit; needs the lock."""
        room, count = self._max_bytes - self._reserved, 0
        for group in found.groups:
            room -= self._page_bytes[group]
            if room < 0:
                break
            count += 1
        if count < len(found.names):
            if not self._plain:
                return Found()
            stop = job.fetch.known + count
            found = Found(stop if count else 0, found.names[:count], found.groups[:count])
        job.reserved = sum(self._page_bytes[group] for group in found.groups)
        self._reserved += job.reserved
        return found

    @staticmethod
    def _pages_of_call(job: _FetchState, found: Found) -> int:
        """Return the pages per call: many small calls contend more than they gain."""
        count = len(found.names)
        calls = max(MIN_CALLS, -(-job.reserved // CALL_BYTES))
        return -(-count // min(calls, count))

    def _allocate(self, job: _FetchState, found: Found) -> None:
        """Allocate a buffer in which loads can use the pages as they lie."""
        counts = [0] * len(self._page_bytes)
        for group in found.groups:
            job.rows.append(counts[group])
            counts[group] += 1
        for group, count in enumerate(counts):
            if count:
                job.buffers[group] = self._staging.take(group, count)

    def _reader(
        self, job: _FetchState, found: Found, indexes: range, store: OpenedStore
    ) -> Callable[[], None]:
        def read() -> None:
            for index in indexes:
                if job.over or index >= job.ends_at:
                    return
                there, error, fault = False, "", None
                try:
                    there = store.read_into(found.names[index], job.row(index).data)
                except RecordError as wrong:
                    fault = wrong.fault
                except StoreError as failed:
                    error = str(failed)
                with self._lock:
                    self._arrive(job, index, error, fault, there=there)

        return read

    @staticmethod
    def _run_in(job: _FetchState, first: int, names: Sequence[str]) -> Buffer | None:
        """Needs the lock."""
        assert job.found is not None
        group, row = job.found.groups[first], job.rows[first]
        for count, name in enumerate(names):
            at = job.index.get(name)
            if at is None or not job.arrived[at]:
                return None
            if job.found.groups[at] != group or job.rows[at] != row + count:
                return None
        return job.buffers[group][row : row + len(names)]

    def _arrive(
        self, job: _FetchState, index: int, error: str, fault: Fault | None, *, there: bool
    ) -> None:
        """Record that a page was read or failed; needs the lock."""
        if job.over:
            return
        if fault is not None:
            job.faults[fault] = job.faults.get(fault, 0) + 1
        job.error = job.error or error
        if not there:
            job.ends_at = min(job.ends_at, index)
        else:
            job.arrived[index] = True
            job.num_bytes += job.row(index).nbytes
        while job.leading < job.ends_at and job.arrived[job.leading]:
            job.leading += 1
        job.changed = True
        if job.leading == job.ends_at:
            self._end(job)

    def _stop(self, job: _FetchState) -> None:
        """Needs the lock."""
        if not job.over:
            job.stopped = True
            self._end(job)

    def _end(self, job: _FetchState, error: str = "") -> None:
        """Needs the lock."""
        job.over = job.changed = True
        job.error = job.error or error

    def _event(self, job: _FetchState) -> Fetched:
        found, fetch = job.found or Found(), job.fetch
        if self._plain:
            arrived = fetch.known + job.leading
        else:
            arrived = found.stop if found.names and job.leading == len(found.names) else 0
        return Fetched(
            fetch.job,
            found.stop,
            arrived,
            job.over,
            found.windows,
            found.state,
            job.num_bytes,
            self._clock() - job.began_s,
            dict(job.faults),
            job.error,
            job.stopped,
        )
