"""One block of each kind of quantised numbers as ggml defines it (ggml-quants.c), in plain Python.

The package `gguf`, which the loader uses, is checked against this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of the kinds IQ4."""

SCALES: Mapping[str, Mapping[int, float]] = {
    "Q2_K": {80: 3e-3, 82: 5e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 2e-4, 2: 15e-4},
    "Q5_K": {0: 1e-4, 2: 15e-4},
    "Q6_K": {208: 1e-4},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 4e-5},
    "IQ3_XXS": {0: 1e-4},
    "IQ3_S": {0: 1e-4},
    "IQ2_XXS": {0: 1e-4},
    "IQ2_XS": {0: 1e-4},
    "IQ2_S": {0: 1e-4},
    "IQ1_S": {0: 1e-3},
    "IQ1_M": {},
    "TQ1_0": {52: 3e-2},
    "TQ2_0": {64: 3e-2},
    "MXFP4": {},
    "NVFP4": {},
}
"""Kind -> where its float16 scales lie in a block, and a size that gives small numbers."""


def random_blocks(kind: str, shape: Sequence[int], block: int, num_bytes: int) -> np.ndarray:
    """Bytes of blocks drawn at random, but for their scales; the same for each shape and kind."""
    count = int(np.prod(shape)) // block
    rng = np.random.default_rng([count, *kind.encode()])
    data = rng.integers(0, 256, (count, num_bytes), np.uint8)
    if kind == "MXFP4":  # an exponent
        data[:, 0] = 120
    if kind == "NVFP4":  # four scales of eight bits
        data[:, :4] = 0x10 | data[:, :4] & 7
    if kind == "IQ1_M":  # the upper nibbles of four numbers
        data[:, 49:56:2] = data[:, 49:56:2] & 15 | np.array([0, 2, 1, 1], np.uint8) << 4
    for at, scale in SCALES[kind].items():
        data[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def decoded(kind: str, block: bytes) -> list[float]:
    """The numbers of one block."""
    return _KINDS[kind](block)


def _half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def _nibbles(levels: bytes) -> list[int]:
    return [q & 15 for q in levels] + [q >> 4 for q in levels]


def _fifth(block: bytes, at: int) -> list[int]:
    """Levels of 5 bits: 32 high bits, then 16 bytes of low ones."""
    high = int.from_bytes(block[at : at + 4], "little")
    return [q | (high >> j & 1) << 4 for j, q in enumerate(_nibbles(block[at + 4 : at + 20]))]


def _q4_1(block: bytes) -> list[float]:
    d, m = _half(block, 0), _half(block, 2)
    return [d * q + m for q in _nibbles(block[4:20])]


def _q5_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 16) for q in _fifth(block, 2)]


def _q5_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _fifth(block, 4)]


def _iq4_nl(block: bytes) -> list[float]:
    return [_half(block, 0) * TABLE[q] for q in _nibbles(block[2:18])]


def _iq4_xs(block: bytes) -> list[float]:
    high, low = int.from_bytes(block[2:4], "little"), block[4:8]
    found: list[float] = []
    for part in range(8):
        scale = (low[part // 2] >> 4 * (part % 2) & 15) | (high >> 2 * part & 3) << 4
        levels = block[8 + 16 * part : 24 + 16 * part]
        found += [_half(block, 0) * (scale - 32) * TABLE[q] for q in _nibbles(levels)]
    return found


def _q2_k(block: bytes) -> list[float]:
    scales, levels, d, least = block[:16], block[16:80], _half(block, 80), _half(block, 82)
    found: list[float] = []
    for i in range(256):
        half, shift, place = i // 128, i % 128 // 32 * 2, i % 32
        level, scale = levels[32 * half + place] >> shift & 3, scales[i // 16]
        found.append(d * (scale & 15) * level - least * (scale >> 4))
    return found


def _q3_k(block: bytes) -> list[float]:
    signs, levels, packed, d = block[:32], block[32:96], block[96:108], _half(block, 108)
    found: list[float] = []
    for i in range(256):
        half, shift, place, group = i // 128, i % 128 // 32 * 2, i % 32, i // 16
        low = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
        scale = (low | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
        level = (levels[32 * half + place] >> shift & 3) - (0 if signs[place] >> i // 32 & 1 else 4)
        found.append(d * scale * level)
    return found


def _pairs(packed: bytes) -> list[tuple[int, int]]:
    """Scale and minimum, of 6 bits each, of the 8 parts of a block of Q4_K or Q5_K."""
    first = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    return first + [
        (packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4)
        for j in range(4, 8)
    ]


def _q4_k(block: bytes) -> list[float]:
    d, least = _half(block, 0), _half(block, 2)
    found: list[float] = []
    for part, (scale, minimum) in enumerate(_pairs(block[4:16])):
        levels = block[16 + part // 2 * 32 : 48 + part // 2 * 32]
        found += [d * scale * (q >> 4 * (part % 2) & 15) - least * minimum for q in levels]
    return found


def _q5_k(block: bytes) -> list[float]:
    d, least, high = _half(block, 0), _half(block, 2), block[16:48]
    found: list[float] = []
    for part, (scale, minimum) in enumerate(_pairs(block[4:16])):
        levels = block[48 + part // 2 * 32 : 80 + part // 2 * 32]
        for q, bits in zip(levels, high, strict=True):
            level = q >> 4 * (part % 2) & 15 | (bits >> part & 1) << 4
            found.append(d * scale * level - least * minimum)
    return found


def _tq1_0(block: bytes) -> list[float]:
    d = _half(block, 52)
    places = [(i % 32, i // 32) for i in range(160)]
    places += [(32 + i % 16, i // 16) for i in range(80)]
    places += [(48 + i % 4, i // 4) for i in range(16)]
    return [d * ((block[at] * 3**power % 256 * 3 >> 8) - 1) for at, power in places]


def _tq2_0(block: bytes) -> list[float]:
    return [
        _half(block, 64) * ((block[32 * (i // 128) + i % 32] >> i % 128 // 32 * 2 & 3) - 1)
        for i in range(256)
    ]


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _mxfp4(block: bytes) -> list[float]:
    return [2.0 ** (block[0] - 127) * _E2M1[q] for q in _nibbles(block[1:17])]


def _nvfp4(block: bytes) -> list[float]:
    found: list[float] = []
    for part in range(4):
        exponent, rest = block[part] >> 3 & 15, block[part] & 7
        scale = rest * 2.0**-9 if not exponent else (1 + rest / 8) * 2.0 ** (exponent - 7)
        found += [scale * _E2M1[q] for q in _nibbles(block[4 + 8 * part : 12 + 8 * part])]
    return found


_KINDS: Mapping[str, Callable[[bytes], list[float]]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}

WRITTEN_OUT = frozenset(_KINDS)
"""Kinds that are decoded here; points of IQ1 to IQ3 are tables of thousands of numbers."""
