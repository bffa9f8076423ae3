"""Caches compiled grammars by content: in memory, and on disk for the next start."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.work import CompileResult, LoadedGrammar

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
MAX_DISK_BYTES = 1 << 30
_OVERHEAD_BYTES = 4096  # fixed size of an entry
_RULES = b"6"  # increment when the input of libraries changes

Entry = LoadedGrammar | str
"""A grammar, or the error of compiling it."""


class GrammarCache:
    """The most recently used grammars and errors, up to a size.

    Thread-safe. Grammars in use survive eviction.

    Args:
        max_bytes: Total size of all entries.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[Entry, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> Entry | None:
        """Return the entry of a digest."""
        with self._lock:
            found = self._entries.get(digest)
            if found is None:
                return None
            self._entries.move_to_end(digest)
            return found[0]

    def put(self, digest: str, entry: Entry, num_bytes: int) -> None:
        """Store an entry; evict the least recently used ones."""
        size = num_bytes + _OVERHEAD_BYTES
        with self._lock:
            old = self._entries.pop(digest, None)
            self.num_bytes += size - (old[1] if old else 0)
            self._entries[digest] = (entry, size)
            while self.num_bytes > self._max_bytes and self._entries:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed


class GrammarStore:
    """A directory of compiled grammars, of one library version and vocabulary.

    Several processes may share it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, digest: str) -> CompileResult | None:
        """Read a grammar from disk; None if it is missing or unreadable."""
        path = self._folder / digest
        try:
            found = msgspec.msgpack.decode(path.read_bytes(), type=CompileResult)
            os.utime(path)
        except (OSError, *MALFORMED):
            return None
        return found

    def write(self, digest: str, result: CompileResult) -> None:
        """Write a grammar to disk. Failures are ignored: the grammar is compiled again."""
        path = self._folder / f".{digest}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(msgspec.msgpack.encode(result))
            path.replace(self._folder / digest)
            _prune(self._folder)
        except OSError as error:
            logger.warning("a compiled grammar cannot be kept in %s: %s", self._folder, error)


def store_folder(root: Path, library: str, vocabulary: Vocabulary) -> Path:
    """Return the directory for one library version and vocabulary below `root`."""
    content = hashlib.sha256(_RULES + library.encode())
    for token in vocabulary.tokens:
        content.update(len(token).to_bytes(4, "little") + token)
    content.update(repr((sorted(vocabulary.special.items()), vocabulary.eos_ids)).encode())
    return root / f"{library}-{content.hexdigest()[:16]}"


def _prune(folder: Path) -> None:
    """Delete the least recently used files until the rest fits."""
    files = [(f.stat().st_mtime, f.stat().st_size, f) for f in folder.iterdir()]
    excess = sum(size for _, size, _ in files) - MAX_DISK_BYTES
    for _, size, file in sorted(files):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size
