"""What a model mostly says after a context: a tree of contexts, read from the newest token back.

A child of a node is its context with one older token; a node knows the token that mostly followed
its context, and how often it was that one. The longest known suffix of a text is found in as many
look-ups as it has tokens (prediction suffix trees; Ron, Singer and Tishby, 1996). Nodes that guess
no better than their parent are not kept, so a tree is small, whatever it was made of.

Shapes: N nodes but the root, each after its parent.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sylvan.config.tree import DRAFT_CONTEXTS as FILE
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError

MOST_NODES = 8_000_000
"""Python needs about 150 bytes for each."""
UNREADABLE = (
    EOFError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a damaged file may raise."""
SHARES = 255
"""`shares` are in parts of it."""


@dataclass(frozen=True, slots=True)
class TreeArrays:
    """A tree as it is written.

    Attributes:
        parents: int32 (N,), the node of each with one token less; the root is 0, others from 1.
        tokens: int32 (N,), the older token.
        guesses: int32 (N + 1,), what mostly followed; the root's first.
        shares: uint8 (N + 1,), how often, in parts of `SHARES`.
        vocab_size: Of the model that said it.
    """

    parents: IntArray
    tokens: IntArray
    guesses: IntArray
    shares: NDArray[np.uint8]
    vocab_size: int

    def save(self, folder: Path) -> None:
        """Write them to `FILE` in a directory, whole or not at all."""
        unfinished = folder / f"unfinished-{FILE}"
        np.savez_compressed(
            unfinished,
            parents=self.parents,
            tokens=self.tokens,
            guesses=self.guesses,
            shares=self.shares,
            vocab_size=np.int64(self.vocab_size),
        )
        unfinished.replace(folder / FILE)


class ContextTree:
    """A tree to guess by.

    Args:
        arrays: See there.

    Attributes:
        depth: Tokens of the longest context.
    """

    def __init__(self, arrays: TreeArrays) -> None:
        self._vocab_size = arrays.vocab_size
        keys = arrays.parents.astype(np.int64) * arrays.vocab_size + arrays.tokens
        self._nodes = dict(zip(keys.tolist(), range(1, len(keys) + 1), strict=True))
        self._guesses: list[int] = arrays.guesses.tolist()
        self._shares: list[float] = (arrays.shares / SHARES).tolist()
        self.depth = _depth(arrays.parents)

    def guess(self, text: list[int]) -> tuple[int, float]:
        """The token that mostly follows the longest known end of `text`, and how often it does."""
        find, size, node = self._nodes.get, self._vocab_size, 0
        for token in reversed(text):
            longer = find(node * size + token)
            if longer is None:
                break
            node = longer
        return self._guesses[node], self._shares[node]


def load_contexts(folder: Path, vocab_size: int) -> ContextTree:
    """The tree in a directory, for a model of so many tokens.

    Raises:
        ConfigError: there is none, or it is damaged, or of another model; names the file.
    """
    file = folder / FILE
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            arrays = TreeArrays(
                stored["parents"],
                stored["tokens"],
                stored["guesses"],
                stored["shares"],
                int(stored["vocab_size"]),
            )
        _check(arrays)
    except UNREADABLE as error:
        raise ConfigError(f"{file} cannot be used: {error}") from None
    if arrays.vocab_size != vocab_size:
        raise ConfigError(
            f"{file} was made for {arrays.vocab_size} tokens, the model has {vocab_size}; choose "
            "one that was made from its answers"
        )
    return ContextTree(arrays)


def _check(arrays: TreeArrays) -> None:
    count = len(arrays.parents)
    if count > MOST_NODES:
        raise ValueError(f"it has {count} contexts; there may be {MOST_NODES}")
    for name, length, dtype in (
        ("parents", count, np.int32),
        ("tokens", count, np.int32),
        ("guesses", count + 1, np.int32),
        ("shares", count + 1, np.uint8),
    ):
        found = getattr(arrays, name)
        if found.shape != (length,) or found.dtype != dtype:
            raise ValueError(f"{name} are {found.dtype}{list(found.shape)}, not {length} numbers")
    if (arrays.parents < 0).any() or (arrays.parents > np.arange(count)).any():
        raise ValueError("parents must come before their children")
    for name in ("tokens", "guesses"):
        ids = getattr(arrays, name)
        if ids.size and not (ids.min() >= 0 and ids.max() < arrays.vocab_size):
            raise ValueError(f"{name} must be ids in 0..{arrays.vocab_size - 1}")


def _depth(parents: IntArray) -> int:
    """Of the deepest node: parents come before their children."""
    depths = [0]
    for parent in parents.tolist():
        depths.append(depths[parent] + 1)
    return max(depths)
