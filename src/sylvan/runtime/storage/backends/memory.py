"""Pages in this process's memory, under `memory:NAME`, for tests and trials.

Faults can be injected: `MemoryStore.fault` makes calls fail or hang, `spoil` corrupts reads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from sylvan.runtime.storage.api import (
    Buffer,
    StoredPage,
    StoreError,
    StoreKind,
    StoreLimits,
    space_of,
    spread,
)
from sylvan.utils.clock import Clock, unix_time

Fault = Callable[[str, str], None]
"""Called with (method, name or ""); raises or sleeps."""

_OPEN: dict[str, MemoryStore] = {}  # by URL: all openers share it
_OPENING = threading.Lock()


class MemoryStore:
    """Implements `PageStore`.

    Attributes:
        fault: Called before every operation.
        spoil: Changes what is read: drops it (None), or corrupts it.
    """

    def __init__(self, limits: StoreLimits, clock: Clock = unix_time) -> None:
        self.fault: Fault = lambda method, name: None
        self.spoil: Callable[[str, bytes], bytes | None] = lambda name, record: record
        self._limits, self._clock = limits, clock
        self._manifest: bytes | None = None
        self._records: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # in order of last use
        self._lock = threading.RLock()

    def read_manifest(self) -> bytes | None:
        self.fault("read_manifest", "")
        return self._manifest

    def write_manifest(self, manifest: bytes) -> bytes:
        self.fault("write_manifest", "")
        with self._lock:
            self._manifest = self._manifest or manifest
            return self._manifest

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        self.fault("contains", "")
        with self._lock:
            return [self._use(name) is not None for name in names]

    def read(self, name: str) -> bytes | None:
        self.fault("read", name)
        with self._lock:
            record = self._use(name)
        return None if record is None else self.spoil(name, record)

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        return spread(self.read(name), parts)

    def write(self, name: str, record: bytes) -> None:
        self.fault("write", name)
        with self._lock:
            self._records.pop(name, None)
            self._make_room(len(record), self._limits.max_bytes, "")
            self._make_room(len(record), self._limits.space_bytes, space_of(name))
            self._records[name] = record, self._clock()

    def remove(self, names: Sequence[str]) -> None:
        self.fault("remove", "")
        with self._lock:
            for name in names:
                self._records.pop(name, None)

    def pages(self) -> Iterator[StoredPage]:
        with self._lock:
            records = list(self._records.items())
        return (StoredPage(name, len(record), used) for name, (record, used) in records)

    def sweep(self) -> int:
        with self._lock:
            gone = [name for name, (_, used) in self._records.items() if self._is_late(used)]
            self.remove(gone)
        return len(gone)

    def clear(self) -> None:
        self.fault("clear", "")
        with self._lock:
            self._records.clear()
            self._manifest = None

    def close(self) -> None:
        """Do nothing: the store stays for later openers."""

    def _use(self, name: str) -> bytes | None:
        record, used = self._records.get(name, (None, 0.0))
        if record is None or self._is_late(used):
            return None
        self._records[name] = record, self._clock()
        self._records.move_to_end(name)
        return record

    def _is_late(self, used_s: float) -> bool:
        ttl = self._limits.ttl_s
        return ttl is not None and self._clock() - used_s > ttl

    def _make_room(self, num_bytes: int, limit: int | None, space: str) -> None:
        """Evict records whose names start with `space` until `num_bytes` more fit."""
        if limit is None:
            return
        if num_bytes > limit:
            raise StoreError(f"a page of {num_bytes} bytes is more than the limit of {limit}")
        own = [(name, len(r)) for name, (r, _) in self._records.items() if name.startswith(space)]
        excess = sum(size for _, size in own) + num_bytes - limit
        for name, size in own:
            if excess <= 0:
                return
            del self._records[name]
            excess -= size


def open_memory(url: str, limits: StoreLimits) -> MemoryStore:
    """Return the store of that name in this process; the first opener sets the limits."""
    with _OPENING:
        if url not in _OPEN:
            _OPEN[url] = MemoryStore(limits)
        return _OPEN[url]


STORE = StoreKind(open=open_memory)
