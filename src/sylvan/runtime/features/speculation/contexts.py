"""A tree of contexts with the model's usual next token, read from the newest token backwards.

A child of a node is its context with one older token; a node stores the most frequent next token
of its context, and its frequency. Finding the longest known suffix of a text takes as many
lookups as it has tokens (prediction suffix trees; Ron, Singer and Tishby, 1996). Nodes that predict
no better than their parent are dropped, so a tree is small, whatever it was trained on.

Shapes: N nodes without the root, each after its parent.
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

MAX_NODES = 8_000_000
"""Python needs about 150 bytes per node."""
UNREADABLE = (
    EOFError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions that reading a damaged file may raise."""
SHARES = 255
"""Denominator of `shares`."""


@dataclass(frozen=True, slots=True)
class TreeArrays:
    """A serialised tree.

    Attributes:
        parents: int32 (N,), node of each context with one token less; the root is 0, others from 1.
        tokens: int32 (N,), the additional older token.
        predictions: int32 (N + 1,), the most frequent next token; the root's first.
        shares: uint8 (N + 1,), its frequency, as a fraction of `SHARES`.
        vocab_size: Vocabulary of the model.
    """

    parents: IntArray
    tokens: IntArray
    predictions: IntArray
    shares: NDArray[np.uint8]
    vocab_size: int

    def save(self, folder: Path) -> None:
        """Write the arrays to `FILE` in a directory, atomically."""
        unfinished = folder / f"unfinished-{FILE}"
        np.savez_compressed(
            unfinished,
            parents=self.parents,
            tokens=self.tokens,
            predictions=self.predictions,
            shares=self.shares,
            vocab_size=np.int64(self.vocab_size),
        )
        unfinished.replace(folder / FILE)


class ContextTree:
    """A tree for drafting.

    Args:
        arrays: The serialised tree.

    Attributes:
        depth: Tokens of the longest context.
    """

    def __init__(self, arrays: TreeArrays) -> None:
        self._vocab_size = arrays.vocab_size
        keys = arrays.parents.astype(np.int64) * arrays.vocab_size + arrays.tokens
        self._nodes = dict(zip(keys.tolist(), range(1, len(keys) + 1), strict=True))
        self._predictions: list[int] = arrays.predictions.tolist()
        self._shares: list[float] = (arrays.shares / SHARES).tolist()
        self.depth = _depth(arrays.parents)

    def predict(self, text: list[int]) -> tuple[int, float]:
        """Return the usual token after the longest known suffix of `text`, and its frequency."""
        find, size, node = self._nodes.get, self._vocab_size, 0
        for token in reversed(text):
            longer = find(node * size + token)
            if longer is None:
                break
            node = longer
        return self._predictions[node], self._shares[node]


def load_contexts(folder: Path, vocab_size: int) -> ContextTree:
    """Load the tree in a directory, for a model with this vocabulary.

    Raises:
        ConfigError: It is missing, damaged, or of another model; the message names the file.
    """
    file = folder / FILE
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            arrays = TreeArrays(
                stored["parents"],
                stored["tokens"],
                stored["predictions"],
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
    if count > MAX_NODES:
        raise ValueError(f"it has {count} contexts; there may be {MAX_NODES}")
    for name, length, dtype in (
        ("parents", count, np.int32),
        ("tokens", count, np.int32),
        ("predictions", count + 1, np.int32),
        ("shares", count + 1, np.uint8),
    ):
        found = getattr(arrays, name)
        if found.shape != (length,) or found.dtype != dtype:
            raise ValueError(f"{name} are {found.dtype}{list(found.shape)}, not {length} numbers")
    if (arrays.parents < 0).any() or (arrays.parents > np.arange(count)).any():
        raise ValueError("parents must come before their children")
    for name in ("tokens", "predictions"):
        ids = getattr(arrays, name)
        if ids.size and not (ids.min() >= 0 and ids.max() < arrays.vocab_size):
            raise ValueError(f"{name} must be ids in 0..{arrays.vocab_size - 1}")


def _depth(parents: IntArray) -> int:
    """Return the depth of the deepest node: parents precede their children."""
    depths = [0]
    for parent in parents.tolist():
        depths.append(depths[parent] + 1)
    return max(depths)
