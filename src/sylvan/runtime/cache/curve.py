"""Hit rate as a function of cache size, from LRU stack distances of past prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sylvan.runtime.cache.types import CacheKey

BLOCK_TOKENS = 64
_MIX = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


def block_hashes(key: CacheKey) -> Hashes:
    """One hash per whole block of `BLOCK_TOKENS`, of the prefix up to the block's end.

    Keys with different namespaces or media share no hash.
    """
    count = len(key.tokens) // BLOCK_TOKENS
    blocks = key.tokens[: count * BLOCK_TOKENS].reshape(count, BLOCK_TOKENS).astype(np.uint64)
    weights = np.power(_MIX, np.arange(1, BLOCK_TOKENS + 1, dtype=np.uint64))
    own = (blocks + np.uint64(1)) @ weights
    for span in key.media:
        first, stop = span.start // BLOCK_TOKENS, -(-span.stop // BLOCK_TOKENS)
        own[first:stop] += _number(b"%d:" % span.start + span.digest)
    place = np.power(_MIX, np.arange(1, count + 1, dtype=np.uint64))
    mixed = (own ^ (own >> np.uint64(31))) * place
    return np.cumsum(mixed, dtype=np.uint64) + _number(key.namespace.encode())


def hit_curve(prompts: Iterable[Hashes], sizes_tokens: Sequence[int]) -> list[tuple[int, float]]:
    """Share of prompt blocks that an LRU cache of each size would have held.

    Mattson's stack algorithm (1970): a block hits in every cache that is larger than the number of
    distinct blocks touched since its last use. A Fenwick tree counts those in O(log n).
    """
    accesses = np.concatenate([np.empty(0, np.uint64), *prompts])
    total = len(accesses)
    counts = np.zeros(total + 1, np.int64)
    last: dict[int, int] = {}
    distances: list[int] = []
    for now, name in enumerate(accesses.tolist(), 1):
        before = last.get(name)
        if before is not None:
            distances.append(_sum(counts, now - 1) - _sum(counts, before))
            _add(counts, before, -1)
        _add(counts, now, 1)
        last[name] = now
    found = np.sort(np.array(distances, np.int64))
    return [
        (size, float(np.searchsorted(found, size // BLOCK_TOKENS, "left")) / max(1, total))
        for size in sizes_tokens
    ]


def _number(name: bytes) -> np.uint64:
    return np.frombuffer(blake2b(name, digest_size=8).digest(), np.uint64)[0]


def _add(counts: NDArray[np.int64], at: int, value: int) -> None:
    while at < len(counts):
        counts[at] += value
        at += at & -at


def _sum(counts: NDArray[np.int64], at: int) -> int:
    total = 0
    while at > 0:
        total += int(counts[at])
        at -= at & -at
    return total
