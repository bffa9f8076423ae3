"""Which adapters are in host memory, which are being read, and which are evicted first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from sylvan.runtime.features.lora.work import AdapterFiles


class Copy(Enum):
    """State of an adapter's host copy."""

    ABSENT = auto()
    WANTED = auto()
    LOADING = auto()
    RESIDENT = auto()


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """An adapter as the scheduler sees it.

    Attributes:
        id: Derived from its name and the contents of its files.
        path: Its directory.
        num_bytes: Size of a host copy.
        pinned: Its host copy and slot are never evicted.
        copy: State of its host copy.
        fresh: The copy was read for a request that has not started yet.
        error: Why the last read failed.
        requests: IDs of the requests that use it and have not finished.
        running: Those of them that have started.
        leaving: It was unloaded, and is removed once it has no requests.
    """

    id: str
    path: str
    num_bytes: int
    pinned: bool = False
    copy: Copy = Copy.ABSENT
    fresh: bool = False
    error: str = ""
    requests: set[str] = field(default_factory=set[str])
    running: set[str] = field(default_factory=set[str])
    leaving: bool = False


class HostCopies:
    """Limits host copies by count and size; evicts the least recently used.

    Args:
        limit: Largest number of copies.
        max_bytes: Largest total size.
    """

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._known: dict[str, AdapterEntry] = {}  # least recently used first
        self._wanted: dict[str, AdapterEntry] = {}
        self._leaving: dict[str, AdapterEntry] = {}
        self._num_kept = self._kept_bytes = 0
        self._num_loading = 0

    def __iter__(self) -> Iterator[AdapterEntry]:
        return iter(self._known.values())

    def get(self, adapter: str) -> AdapterEntry | None:
        """Return the adapter with an ID."""
        return self._known.get(adapter)

    @property
    def num_resident(self) -> int:
        """Number of adapters with a copy, or whose copy is being read."""
        return self._num_kept

    @property
    def loading(self) -> bool:
        """Whether a copy is being read."""
        return self._num_loading > 0

    def add(self, adapter: AdapterEntry, *, resident: bool) -> None:
        """Register an adapter; `resident`: its copy has already been read."""
        if (known := self._known.get(adapter.id)) is not None:
            known.leaving, known.pinned, known.path = False, adapter.pinned, adapter.path
            self._leaving.pop(known.id, None)
            adapter = known
        self._known[adapter.id] = adapter
        if resident and adapter.copy is not Copy.RESIDENT:
            if adapter.copy is not Copy.LOADING:
                self._count(adapter, 1)
            else:
                self._num_loading -= 1
            self._wanted.pop(adapter.id, None)
            adapter.copy = Copy.RESIDENT

    def leave(self, adapter: AdapterEntry) -> None:
        """Unload an adapter; it is removed once it has no requests."""
        adapter.leaving, adapter.pinned = True, False
        self._leaving[adapter.id] = adapter

    def use(self, adapter: AdapterEntry) -> bool:
        """Use an adapter; return whether it is resident, and start reading it if not."""
        self._known[adapter.id] = self._known.pop(adapter.id)
        if adapter.copy is Copy.ABSENT:
            adapter.copy = Copy.WANTED
            self._wanted[adapter.id] = adapter
        return adapter.copy is Copy.RESIDENT

    def next_loads(self) -> tuple[list[str], list[AdapterFiles]]:
        """Return the copies to evict now, and the adapters to read instead."""
        dropped = self._shrink(0, 0)
        loads: list[AdapterFiles] = []
        for adapter in tuple(self._wanted.values()):
            if not adapter.requests and not adapter.pinned:  # all its requests have finished
                del self._wanted[adapter.id]
                adapter.copy = Copy.ABSENT
                continue
            if (why := self._never_fits(adapter)) is not None:
                del self._wanted[adapter.id]
                adapter.copy, adapter.error = Copy.ABSENT, why
                continue
            if not self._fits(1, adapter.num_bytes):
                dropped += self._shrink(1, adapter.num_bytes)
                if not self._fits(1, adapter.num_bytes):
                    break  # others must not be read in its place forever
            del self._wanted[adapter.id]
            adapter.copy, adapter.fresh = Copy.LOADING, True
            self._count(adapter, 1)
            self._num_loading += 1
            loads.append(AdapterFiles(adapter.id, adapter.path))
        return dropped, loads

    @property
    def has_work(self) -> bool:
        """Whether `next_loads` may return something."""
        if self._wanted or any(not a.requests for a in self._leaving.values()):
            return True
        return not self._fits(0, 0) and any(self._may_go(a) for a in self)

    @property
    def has_room(self) -> bool:
        """Whether another copy fits that is as large as the largest so far."""
        return self._fits(1, max((a.num_bytes for a in self), default=0))

    def loaded(self, adapter: str) -> None:
        """Record that a copy was read."""
        known = self._known.get(adapter)
        if known is not None and known.copy is Copy.LOADING:
            self._num_loading -= 1
            known.copy, known.error = Copy.RESIDENT, ""

    def failed(self, adapter: str, why: str) -> None:
        """Record that a copy could not be read."""
        known = self._known.get(adapter)
        if known is not None and known.copy is Copy.LOADING:
            self._num_loading -= 1
            self._count(known, -1)
            known.copy, known.fresh, known.error = Copy.ABSENT, False, why

    def _shrink(self, more: int, more_bytes: int) -> list[str]:
        """Evict copies until this much fits, as far as possible."""
        dropped: list[str] = []
        for adapter in tuple(self._known.values()):
            leaves = adapter.leaving and not adapter.requests
            goes = leaves and adapter.copy is Copy.RESIDENT
            if goes or (not self._fits(more, more_bytes) and self._may_go(adapter)):
                dropped.append(adapter.id)
                self._count(adapter, -1)
                adapter.copy, adapter.fresh = Copy.ABSENT, False
            if leaves and adapter.copy in (Copy.ABSENT, Copy.WANTED):
                self._forget(adapter)
        return dropped

    def _may_go(self, adapter: AdapterEntry) -> bool:
        """Whether a copy is unused and may be evicted."""
        needed = adapter.pinned or adapter.running or (adapter.fresh and adapter.requests)
        return adapter.copy is Copy.RESIDENT and not needed

    def _forget(self, adapter: AdapterEntry) -> None:
        for names in (self._known, self._wanted, self._leaving):
            names.pop(adapter.id, None)

    def _never_fits(self, adapter: AdapterEntry) -> str | None:
        """Return why a copy can never fit, even after evicting everything evictable."""
        pinned = [a for a in self if a.pinned and a is not adapter]
        num_bytes = adapter.num_bytes + sum(a.num_bytes for a in pinned)
        if num_bytes <= self._max_bytes and len(pinned) < self._limit:
            return None
        return (
            f"the adapter has no room in host memory: it takes {adapter.num_bytes:,} bytes beside "
            f"{len(pinned)} pinned ones, {num_bytes:,} in all; lora.memory is {self._max_bytes:,} "
            f"and lora.max_loaded {self._limit:,}"
        )

    def _fits(self, more: int, more_bytes: int) -> bool:
        return (
            self._num_kept + more <= self._limit
            and self._kept_bytes + more_bytes <= self._max_bytes
        )

    def _count(self, adapter: AdapterEntry, sign: int) -> None:
        self._num_kept += sign
        self._kept_bytes += sign * adapter.num_bytes
