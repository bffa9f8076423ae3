"""Moves pages between device, host memory and store, concurrently with steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.memory import PageMemory, Transfer
from sylvan.runtime.features.tiers.fetches import Fetches
from sylvan.runtime.features.tiers.host_memory import HostLayout, HostMemory
from sylvan.runtime.features.tiers.opened import OpenedStore, open_spec
from sylvan.runtime.features.tiers.staging import Staging
from sylvan.runtime.features.tiers.threads import DaemonThreads, MakeThreads
from sylvan.runtime.features.tiers.work import (
    Attached,
    Cleared,
    Commit,
    Event,
    Events,
    Export,
    Exported,
    HostPage,
    Loaded,
    LoadPages,
    Page,
    Persisted,
    Save,
    Saved,
    StoreSpec,
    TiersWork,
)
from sylvan.runtime.storage.api import StoreError
from sylvan.runtime.storage.record import Fault, RecordError

READERS, WRITERS = 8, 2
REPORT_S = 0.005  # each report costs the scheduler a step, for which readers would wait
COPIERS = 1  # threads between buffers and the host tier
CLOSE_S = 5.0  # seconds to finish writes to the store when the process exits

Buffer = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Part:
    """Pages of one group in a buffer, on their way from or to the device."""

    group: int
    pages: list[Page | HostPage]
    buffer: Buffer
    transfer: Transfer | None = None
    filled: bool = False  # the buffer holds the bytes of a load

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Page numbers on the device."""
        return np.array([page.page for page in self.pages], np.int32)

    def rows(self) -> Iterator[tuple[Page | HostPage, Buffer]]:
        """Pages with their bytes."""
        return zip(self.pages, self.buffer.reshape(len(self.pages), -1), strict=True)


@dataclass(slots=True, eq=False)
class _Save:
    """Pages on their way to the host tier."""

    parts: list[_Part]
    began_s: float
    ended: bool = False  # the copy from the device


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one request; `ready` once all bytes are in the buffers."""

    parts: list[_Part]
    began_s: float
    ready: bool = False
    over: bool = False
    error: str = ""
    faults: dict[Fault, int] = field(default_factory=dict[Fault, int])
    saved_bytes: int = 0
    saved_seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Size of all pages."""
        return sum(part.buffer.nbytes for part in self.parts)

    @property
    def importing(self) -> bool:
        """Whether device memory may be written now."""
        return any(part.transfer is not None for part in self.parts)


class Mover:
    """Executes `TiersWork`; `events` reports progress.

    Args:
        memory: Page memory of each group, in the order of `groups`.
        groups: KV groups of the model.
        max_staged_bytes: Host memory limit for pages read for waiting requests.
        threads: Creates a number of named threads that wait for the store.
        host: Slots of the host tier, if any.
        report_s: Shortest interval between progress reports of a fetch.
    """

    def __init__(
        self,
        memory: Sequence[PageMemory],
        groups: Sequence[KVGroup],
        max_staged_bytes: int,
        threads: MakeThreads = DaemonThreads,
        host: HostLayout | None = None,
        report_s: float = REPORT_S,
    ) -> None:
        self._memory = tuple(memory)
        self._host = HostMemory(host) if host is not None else None
        self._copiers = threads(COPIERS, "sylvan-kv-host")
        self._saves: dict[int, _Save] = {}
        self._readers = threads(READERS, "sylvan-kv-read")
        self._writers = threads(WRITERS, "sylvan-kv-write")
        self._staging = staging = Staging(memory, max_staged_bytes)
        self._fetches = Fetches(staging, groups, self._readers, max_staged_bytes, report_s=report_s)
        self._store: OpenedStore | None = None
        self._exports: dict[int, list[_Part]] = {}
        self._exported: set[int] = set()  # those already reported
        self._loads: dict[int, _Load] = {}
        self._events: list[Event] = []
        self._lock = threading.Lock()  # guards `_events`
        self._turn = threading.Lock()  # of exports and loads: steps and reports may overlap

    def open(self, spec: StoreSpec) -> None:
        """Use a store from now on, replacing the current one.

        Raises:
            ConfigError: It holds pages of another model, or cannot be opened this way.
            StoreError: It is unreachable.
        """
        opened = open_spec(spec)
        self._use(opened)
        self._warm_up()

    def begin(self, work: TiersWork) -> None:
        """Start all the work; blocks only for `urgent` exports."""
        with self._turn:
            for save in work.saves:
                self._save(save)
            for export in work.exports:
                self._export(export)
            for job in work.urgent:
                self._finish_export(job)
            for commit in work.commits:
                self._commit(commit)
            for fetch in work.fetches:
                self._fetches.begin(fetch, self._store)
            for job in work.stops:
                self._fetches.stop(job)
            for load in work.loads:
                self._load(load)
            for job in work.cancels:
                self._cancel(job)
            for job in work.releases:
                self._fetches.release(job)
        self._change_store(work)

    def events(self) -> Events | None:
        """Return the events since the last call; None: none."""
        with self._turn:
            for number, save in [*self._saves.items()]:
                self._keep(number, save)
            for number, parts in self._exports.items():
                if number not in self._exported and all(map(_is_done, parts)):
                    self._exported.add(number)
                    ok = not any(p.transfer is None or p.transfer.error for p in parts)
                    self._report(Exported(number, ok))
            for number, load in [*self._loads.items()]:
                self._advance(number, load)
        fetched = self._fetches.events()
        with self._lock:
            events, self._events = self._events, []
        return (*fetched, *events) or None

    def close(self) -> None:
        """Wait a while for writes to the store to finish."""
        self._fetches.stop_all()
        finished = self._writers.close(CLOSE_S)
        if finished and self._store is not None:
            self._store.pages.close()
        self._copiers.close(0.0)
        self._readers.close(0.0)

    # ---- to the host tier

    def _save(self, save: Save) -> None:
        parts = self._parts(save.pages)
        for part in parts:
            part.transfer = self._memory[part.group].export(part.numbers, part.buffer)
        self._saves[save.job] = _Save(parts, time.monotonic())

    def _keep(self, number: int, save: _Save) -> None:
        """Write what was copied from the device to its slots."""
        if not all(map(_is_done, save.parts)):
            return
        del self._saves[number]
        if any(part.transfer is None or part.transfer.error for part in save.parts):
            self._report(Saved(number, ok=False))
            return
        self._copiers.submit(lambda: self._write_slots(number, save))

    def _write_slots(self, number: int, save: _Save) -> None:
        assert self._host is not None
        num_bytes = 0
        try:
            for part in save.parts:
                for page, row in part.rows():
                    assert isinstance(page, HostPage)
                    num_bytes += self._host.write(part.group, page.slot, row)
        except Exception:
            self._report(Saved(number, ok=False))
            raise
        self._report(Saved(number, ok=True, num_bytes=num_bytes, seconds=_elapsed_s(save.began_s)))

    # ---- to the store

    def _export(self, export: Export) -> None:
        parts = self._parts(export.pages)
        if export.from_host:
            self._export_slots(parts)
            self._exports[export.job] = parts
            return
        try:
            for part in parts:
                part.transfer = self._memory[part.group].export(part.numbers, part.buffer)
        except ValueError as error:
            self._report(Exported(export.job, ok=False))
            raise AssertionError(f"pages that do not exist are exported: {error}") from error
        self._exports[export.job] = parts

    def _finish_export(self, job: int) -> None:
        for part in self._exports.get(job, ()):
            if part.transfer is not None:
                part.transfer.wait()

    def _export_slots(self, parts: Sequence[_Part]) -> None:
        """Copy pages from the host tier; their numbers are its slots."""
        host = self._host
        assert host is not None
        for part in parts:
            part.transfer = copy = SlotCopy(part.buffer.nbytes)

            def read(part: _Part = part, copy: SlotCopy = copy) -> None:
                try:
                    for page, row in part.rows():
                        host.read(part.group, page.page, row)
                except Exception as error:
                    copy.end(str(error))
                    raise
                copy.end()

            self._copiers.submit(read)

    def _commit(self, commit: Commit) -> None:
        parts = self._exports.pop(commit.job, None)
        self._exported.discard(commit.job)
        if parts is None or not commit.names:
            return
        store = self._store
        self._writers.submit(lambda: self._persist(commit, parts, store))

    def _persist(self, commit: Commit, parts: list[_Part], store: OpenedStore | None) -> None:
        began, wanted = time.monotonic(), set(commit.names)
        count = written = 0
        error = "" if store is not None else "no store is attached"
        for part in parts:
            for page, row in part.rows():
                assert isinstance(page, Page)
                if store is None or error or page.name not in wanted:
                    continue
                try:
                    written += store.write(page.name, row.data)
                    count += 1
                    wanted.discard(page.name)
                except StoreError as failed:
                    error = str(failed)
        seconds = time.monotonic() - began
        lost = tuple(sorted(wanted))
        self._report(Persisted(commit.job, count, written, seconds, lost, error))

    # ---- to the device

    def _load(self, work: LoadPages) -> None:
        parts = self._parts_of_load(work)
        load = self._loads[work.job] = _Load(parts, time.monotonic())
        if all(part.filled for part in parts):
            load.ready = True
            self._advance(work.job, load)
            return
        store = self._store
        self._readers.submit(lambda: self._gather(load, store))

    def _parts_of_load(self, work: LoadPages) -> list[_Part]:
        """Return where the pages of a load are, or where to gather them."""
        found: list[_Part] = []
        for group, pages in _by_group((*work.saved, *work.pages)).items():
            names = [page.name for page in pages if isinstance(page, Page)]
            run = self._fetches.run_of(names) if len(names) == len(pages) else None
            buffer = self._staging.take(group, len(pages)) if run is None else run
            found.append(_Part(group, pages, buffer.reshape(-1), filled=run is not None))
        return found

    def _gather(self, load: _Load, store: OpenedStore | None) -> None:
        """Gather all pages of a load in its buffers."""
        for part in load.parts:
            for page, row in part.rows() if not part.filled else ():
                if load.over:
                    return
                if isinstance(page, HostPage):
                    self._read_slot(load, page, row)
                elif not self._fill(load, store, page.name, row):
                    load.error = load.error or f"{page.name} is not there"
                    load.ready = True
                    return
        load.ready = True

    def _fill(self, load: _Load, store: OpenedStore | None, name: str, row: Buffer) -> bool:
        """Read a page from a fetch, or else from the store."""
        payload = self._fetches.payload(name)
        if payload is None:
            return _read(load, store, name, row)
        row[:] = payload
        return True

    def _read_slot(self, load: _Load, page: HostPage, row: Buffer) -> None:
        assert self._host is not None
        began = time.monotonic()
        self._host.read(page.group, page.slot, row)
        load.saved_bytes += row.nbytes
        load.saved_seconds += _elapsed_s(began)

    def _advance(self, number: int, load: _Load) -> None:
        """Advance a load: start writing to the device, or report its end."""
        if not load.ready:
            return
        if not load.error and not load.importing:
            for part in load.parts:
                part.transfer = self._memory[part.group].import_(part.numbers, part.buffer)
        if load.importing and not all(map(_is_done, load.parts)):
            return
        errors = [p.transfer.error for p in load.parts if p.transfer and p.transfer.error]
        error = load.error or next(iter(errors), "")
        self._finish(number, load, error)

    def _finish(self, number: int, load: _Load, error: str) -> None:
        load.over = True
        del self._loads[number]
        ok = not error
        self._report(
            Loaded(
                number,
                "ok" if ok else "failed",
                num_bytes=load.num_bytes if ok else 0,
                saved_bytes=load.saved_bytes if ok else 0,
                seconds=_elapsed_s(load.began_s),
                saved_seconds=load.saved_seconds,
                faults=dict(load.faults),
                error=error,
            )
        )

    def _cancel(self, number: int) -> None:
        load = self._loads.get(number)
        if load is None or load.importing:
            return  # it has ended, or will soon
        load.over = True
        del self._loads[number]
        self._report(Loaded(number, "cancelled", error="it took too long"))

    # ---- the store itself

    def _change_store(self, work: TiersWork) -> None:
        if work.detach:
            self._use(None)
        if work.attach is not None:
            spec = work.attach
            self._readers.submit(lambda: self._attach(spec))
        if work.clear:
            self._readers.submit(self._clear)

    def _attach(self, spec: StoreSpec) -> None:
        try:
            opened = open_spec(spec)
        except ConfigError as error:
            self._report(Attached(spec.url, str(error)))
        except StoreError as error:
            self._report(Attached(spec.url, str(error), 503))
        else:
            self._use(opened)
            self._report(Attached(spec.url))

    def _clear(self) -> None:
        store, error = self._store, ""
        try:
            if store is not None:
                store.clear()
        except StoreError as failed:
            error = str(failed)
        self._report(Cleared(error))

    def _use(self, opened: OpenedStore | None) -> None:
        before, self._store = self._store, opened
        self._fetches.stop_all()
        if before is not None:
            self._writers.submit(before.pages.close)

    def _warm_up(self) -> None:
        """Warm up threads and memory before the first request needs them."""
        self._readers.submit(self._staging.warm_up)
        first = np.zeros(1, np.int32)
        self._memory[0].export(first, self._staging.take(0, 1).reshape(-1))

    # ---- both

    def _parts(self, pages: Sequence[Page | HostPage]) -> list[_Part]:
        """Group pages, with a buffer for each group."""
        return [
            _Part(group, some, self._staging.take(group, len(some)).reshape(-1))
            for group, some in _by_group(pages).items()
        ]

    def _report(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)


class SlotCopy:
    """Implements `Transfer` for a copy made by one of our threads."""

    checksums = None

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.error: str | None = None
        self._over = threading.Event()

    def end(self, error: str | None = None) -> None:
        """Mark the copy as ended."""
        self.error = error
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()


def _elapsed_s(began_s: float) -> float:
    return time.monotonic() - began_s


def _is_done(part: _Part) -> bool:
    return part.transfer is None or part.transfer.done()


def _by_group(pages: Sequence[Page | HostPage]) -> dict[int, list[Page | HostPage]]:
    found: dict[int, list[Page | HostPage]] = {}
    for page in pages:
        found.setdefault(page.group, []).append(page)
    return found


def _read(load: _Load, store: OpenedStore | None, name: str, row: Buffer) -> bool:
    """Read a page that no fetch has brought; return whether that worked."""
    if store is None:
        load.error = "no store is attached"
        return False
    try:
        return store.read_into(name, row.data)
    except RecordError as wrong:
        load.faults[wrong.fault] = load.faults.get(wrong.fault, 0) + 1
        load.error = str(wrong)
    except StoreError as error:
        load.error = str(error)
    return False
