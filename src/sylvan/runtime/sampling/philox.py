"""Counter-based random numbers: a value depends on its key and counter, never on earlier draws.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]
"""32-bit words, each in 64 bits so that products do not overflow."""


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds over many counters at once.

    Args:
        counter: (4, n) words.
        key: (2, n) words.

    Returns:
        (4, n) words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (high >> _HALF) ^ c1 ^ k0,
            high & _MASK,
            (low >> _HALF) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3))


def uniform(
    seeds: NDArray[np.int64], samples: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, sample, position)."""
    bits = seeds.astype(np.uint64)
    places = positions.astype(np.uint64)
    zeros = np.zeros_like(places)
    counter = np.stack((places & _MASK, places >> _HALF, samples.astype(np.uint64) & _MASK, zeros))
    words = philox4x32(counter, np.stack((bits & _MASK, bits >> _HALF)))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high.astype(np.float64) * 2.0**26 + low.astype(np.float64)) / 2.0**53
