"""The state of encoded items; the worker half holds the embeddings."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from sylvan.protocol.media import MediaItem, MediaKind
from sylvan.runtime.features.multimodal.work import EncodeJob


class EncodingProgress(Enum):
    """Progress of encoding an item."""

    ABSENT = auto()
    WANTED = auto()
    RUNNING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class ItemEncoding:
    """An item: its inputs while requests use it, and its progress."""

    kind: MediaKind
    count: int
    features: dict[str, np.ndarray]
    progress: EncodingProgress = EncodingProgress.ABSENT
    num_bytes: int = 0
    error: str = ""
    users: set[str] = field(default_factory=set[str])

    @property
    def input_bytes(self) -> int:
        """Size of its features."""
        return sum(array.nbytes for array in self.features.values())


class Encodings:
    """Items by key. Embeddings of unused items are cached up to `max_bytes`, newest first.

    Attributes:
        encoded: Number of encoded items.
        num_ready: Number of items with embeddings.
        asked: Number of items in requests, by kind.
        reused: How many of these were already encoded.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: dict[bytes, ItemEncoding] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # ready and unused, oldest first
        self._num_bytes = 0
        self._wanted: list[bytes] = []
        self._dropped: list[bytes] = []
        self._running = 0
        self.encoded = 0
        self.num_ready = 0
        self.asked: Counter[MediaKind] = Counter()
        self.reused: Counter[MediaKind] = Counter()

    @property
    def num_bytes(self) -> int:
        """Size of all cached embeddings."""
        return self._num_bytes

    @property
    def has_work(self) -> bool:
        """Whether the worker half has something to do or to report."""
        return bool(self._wanted or self._running or self._dropped)

    def add(self, rid: str, key: bytes, item: MediaItem, count: int) -> None:
        """Add an item of a new request."""
        known = self._items.get(key)
        if known is None:
            known = self._items[key] = ItemEncoding(item.kind, count, item.features)
        elif not known.features:
            known.features = item.features
        self.asked[item.kind] += 1
        if known.progress is EncodingProgress.READY:
            self.reused[item.kind] += 1
        known.users.add(rid)
        self._idle.pop(key, None)

    def leave(self, rid: str, key: bytes) -> None:
        """Release an item of a finished request."""
        known = self._items.get(key)
        if known is None:
            return
        known.users.discard(rid)
        if known.users:
            return
        known.features = {}
        if known.progress is EncodingProgress.READY:
            self._idle[key] = None
            self._shrink()
        elif known.progress is not EncodingProgress.RUNNING:
            self._wanted = [wanted for wanted in self._wanted if wanted != key]
            del self._items[key]

    def want(self, key: bytes) -> bool:
        """Return whether an item's embeddings are ready; if not, request them.

        Raises:
            KeyError: No live request has the item.
        """
        known = self._items[key]
        if known.progress is EncodingProgress.ABSENT:
            known.progress = EncodingProgress.WANTED
            self._wanted.append(key)
        return known.progress is EncodingProgress.READY

    def error(self, key: bytes) -> str:
        """Why an item cannot be encoded; empty: no error."""
        return self._items[key].error

    def next_jobs(self) -> tuple[tuple[bytes, ...], tuple[EncodeJob, ...]]:
        """Return keys whose embeddings are dropped, and items to encode."""
        dropped, self._dropped = tuple(self._dropped), []
        jobs: list[EncodeJob] = []
        for key in self._wanted:
            known = self._items[key]
            known.progress = EncodingProgress.RUNNING
            self._running += 1
            jobs.append(
                EncodeJob(key=key, kind=known.kind, count=known.count, features=known.features)
            )
        self._wanted = []
        return dropped, tuple(jobs)

    def done(self, key: bytes, num_bytes: int) -> None:
        """Record that an item was encoded."""
        known = self._items[key]
        self._running -= 1
        self.encoded += 1
        self.num_ready += 1
        known.progress, known.num_bytes = EncodingProgress.READY, num_bytes
        self._num_bytes += num_bytes
        if not known.users:
            self._idle[key] = None
        self._shrink()

    def failed(self, key: bytes, why: str) -> None:
        """Record that the encoder rejected an item."""
        known = self._items[key]
        self._running -= 1
        known.progress, known.error = EncodingProgress.FAILED, why
        if not known.users:
            del self._items[key]

    def _shrink(self) -> None:
        while self._num_bytes > self._max_bytes and self._idle:
            key, _ = self._idle.popitem(last=False)
            self._num_bytes -= self._items.pop(key).num_bytes
            self.num_ready -= 1
            self._dropped.append(key)
