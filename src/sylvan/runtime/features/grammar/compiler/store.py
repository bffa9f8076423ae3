"""Proofs on disk, so that a restarted server compiles nothing twice."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.features.grammar.compiler.messages import Proof
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_DISK_BYTES = 1 << 30

_RULES = b"6"  # one more, when what is given to libraries changes


class GrammarStore:
    """A folder of proofs, of one library version and vocabulary; several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, digest: str) -> Proof | None:
        """A proof from disk."""
        path = self._folder / digest
        try:
            proof = msgspec.msgpack.decode(path.read_bytes(), type=Proof)
            os.utime(path)
        except (OSError, *MALFORMED):
            return None
        return proof

    def write(self, digest: str, proof: Proof) -> None:
        """Keep a proof on disk. Failing is no error: the grammar is compiled again."""
        path = self._folder / f".{digest}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(msgspec.msgpack.encode(proof))
            path.replace(self._folder / digest)
            _prune(self._folder)
        except OSError as error:
            logger.warning("a compiled grammar cannot be kept in %s: %s", self._folder, error)


def store_folder(root: Path, library: str, vocabulary: Vocabulary) -> Path:
    """Where proofs of one library version and vocabulary lie below `root`."""
    content = hashlib.sha256(_RULES + library.encode())
    for token in vocabulary.tokens:
        content.update(len(token).to_bytes(4, "little") + token)
    content.update(repr((sorted(vocabulary.special.items()), vocabulary.eos_ids)).encode())
    return root / f"{library}-{content.hexdigest()[:16]}"


def _prune(folder: Path) -> None:
    """Delete the files not used for longest, until the rest fits."""
    files = [(f.stat().st_mtime, f.stat().st_size, f) for f in folder.iterdir()]
    excess = sum(size for _, size, _ in files) - MAX_DISK_BYTES
    for _, size, file in sorted(files):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size
