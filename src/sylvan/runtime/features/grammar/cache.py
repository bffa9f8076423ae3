"""Compiled grammars by content, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from sylvan.runtime.features.grammar.work import LoadedGrammar

MAX_BYTES = 256 << 20
_OVERHEAD_BYTES = 4096  # of an entry, whatever it is

Entry = LoadedGrammar | str
"""A grammar, or why there is none."""


class GrammarCache:
    """Keeps the most recently used grammars, and refusals, up to a size.

    Thread-safe. Grammars that requests use live on without it.

    Args:
        max_bytes: Of all entries together.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[Entry, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> Entry | None:
        """What is kept under a digest."""
        with self._lock:
            found = self._entries.get(digest)
            if found is None:
                return None
            self._entries.move_to_end(digest)
            return found[0]

    def put(self, digest: str, entry: Entry, num_bytes: int) -> None:
        """Keep an entry; the least recently used ones make room."""
        size = num_bytes + _OVERHEAD_BYTES
        with self._lock:
            old = self._entries.pop(digest, None)
            self.num_bytes += size - (old[1] if old else 0)
            self._entries[digest] = (entry, size)
            while self.num_bytes > self._max_bytes and self._entries:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed
