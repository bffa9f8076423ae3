"""GGUF's lattice types IQ1, IQ2 and IQ3: indices of grid points, and signs.

A grid point is a vector of four or eight magnitudes. The grids come from the package `gguf`; their
magnitudes become 4-bit codes. Layouts: `ggml-quants.c` and gguf-py's `quants.py`.

Shapes: N rows, B blocks of 256 numbers.
"""

from __future__ import annotations

from functools import cache

import torch

from sylvan.checkpoints.gguf.quants import library
from sylvan.kernels.matmul.codes import IQ2, IQ3_S, IQ3_XXS, Code, paired
from sylvan.kernels.matmul.weights import CodedWeight

_SIZES = {"IQ3_XXS": IQ3_XXS, "IQ3_S": IQ3_S}
_NEGATIVE = 8  # added to the code of a magnitude
_STEPS = 8.0  # of IQ1's numbers in one


@cache
def _points(kind: str) -> torch.Tensor:
    """Which magnitude each number of a point has. Shape: (points, 4 or 8), uint8."""
    table = getattr(library().quants, kind)
    table.init_grid()
    numbers = torch.from_numpy(table.grid.copy()).flatten(0, 2)
    if kind.startswith("IQ1"):
        return (numbers + 1).to(torch.uint8)  # -1, 0, 1
    sizes = torch.tensor(_SIZES.get(kind, IQ2[:3]), dtype=numbers.dtype)
    return torch.searchsorted(sizes, numbers.contiguous()).to(torch.uint8)


@cache
def _even_signs() -> torch.Tensor:
    """Eight signs by their first seven: the number of negative ones is even. Shape: (128,)."""
    return torch.tensor(list(library().quants.IQ2_XXS.ksigns), dtype=torch.uint8)


def _bits(raw: torch.Tensor) -> torch.Tensor:
    """Shape: (..., n) bytes -> (..., 8 n), the lowest first."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _parts(raw: torch.Tensor, width: int, count: int, mask: int) -> torch.Tensor:
    """Fields of integers, the lowest first. Shape: (..., n) -> (..., n count), int32."""
    return (raw.int()[..., None] >> width * torch.arange(count) & mask).flatten(-2)


def _shorts(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _words(raw: torch.Tensor) -> torch.Tensor:
    return raw.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _step(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float16).float()


def _coded(
    kind: str, points: torch.Tensor, signs: torch.Tensor, scale: torch.Tensor, code: Code
) -> CodedWeight:
    """Decode points (N, B, p), signs (N, B, 256) and scales (N, B, groups)."""
    sizes = _points(kind)[points].flatten(-2)
    q = (sizes + signs.to(torch.uint8) * _NEGATIVE).flatten(1)
    group = 256 // scale.shape[-1]
    return CodedWeight(paired(q), scale.float().flatten(1).contiguous(), code, group)


def iq2_xxs(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ2_XXS as codes and scales."""
    rest = raw[..., 2:].unflatten(-1, (8, 8))
    words = _words(rest[..., 4:]).squeeze(-1)
    signs = _bits(_even_signs()[_parts(words, 7, 4, 127)])
    scale = _step(raw[..., :2]) * (0.5 + (words >> 28 & 15)) * 0.25
    points = rest[..., :4].flatten(-2).int()
    return _coded("IQ2_XXS", points, signs, scale, "iq2")


def iq2_xs(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ2_XS as codes and scales."""
    shorts = _shorts(raw[..., 2:66])
    signs = _bits(_even_signs()[shorts >> 9])
    scale = _step(raw[..., :2]) * (0.5 + _parts(raw[..., 66:74], 4, 2, 15)) * 0.25
    return _coded("IQ2_XS", shorts & 511, signs, scale, "iq2")


def iq2_s(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ2_S as codes and scales."""
    points = raw[..., 2:34].int() | _parts(raw[..., 66:74], 2, 4, 3) << 8
    scale = _step(raw[..., :2]) * (0.5 + _parts(raw[..., 74:82], 4, 2, 15)) * 0.25
    return _coded("IQ2_S", points, _bits(raw[..., 34:66]), scale, "iq2")


def iq3_xxs(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ3_XXS as codes and scales."""
    words = _words(raw[..., 66:98])
    signs = _bits(_even_signs()[_parts(words, 7, 4, 127)])
    scale = _step(raw[..., :2]) * (0.5 + (words >> 28 & 15)) * 0.5
    return _coded("IQ3_XXS", raw[..., 2:66].int(), signs, scale, "iq3_xxs")


def iq3_s(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ3_S as codes and scales."""
    points = raw[..., 2:66].int() | _bits(raw[..., 66:74]).int() << 8
    scale = _step(raw[..., :2]) * (1 + 2 * _parts(raw[..., 106:110], 4, 2, 15))
    return _coded("IQ3_S", points, _bits(raw[..., 74:106]), scale, "iq3_s")


_MOVED = torch.tensor(
    # codes of -7, 1, 9 and of -9, -1, 7: eighths of -1, 0, 1 moved up and down by one
    [[4 + _NEGATIVE, 3, 5], [5 + _NEGATIVE, 3 + _NEGATIVE, 4]],
    dtype=torch.uint8,
)


def _moved(points: torch.Tensor, down: torch.Tensor, scale: torch.Tensor) -> CodedWeight:
    """Numbers of points (N, B, 32), each moved by an eighth of the scale. `down`: (N, B, 32)."""
    numbers = _points("IQ1_S")[points]
    q = _MOVED[down.int()[..., None], numbers.int()].flatten(1)
    group = 256 // scale.shape[-1]
    return CodedWeight(paired(q), (scale / _STEPS).flatten(1).contiguous(), "iq2", group)


def iq1_s(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ1_S as codes and scales."""
    high = _shorts(raw[..., 34:50])
    points = raw[..., 2:34].int() | _parts(high, 3, 4, 7) << 8
    down = (high >> 15).repeat_interleave(4, -1)
    return _moved(points, down, _step(raw[..., :2]) * (2 * (high >> 12 & 7) + 1))


def iq1_m(raw: torch.Tensor) -> CodedWeight:
    """Read blocks of GGUF type IQ1_M as codes and scales."""
    shorts, high = _shorts(raw[..., 48:56]), _parts(raw[..., 32:48], 4, 2, 15)
    step = sum(part >> 12 << 4 * i for i, part in enumerate(shorts.unbind(-1)))
    assert isinstance(step, torch.Tensor)
    scale = step.to(torch.int16).view(torch.float16).float()[..., None]
    points = raw[..., :32].int() | (high & 7) << 8
    return _moved(points, high >> 3, scale * (2 * _parts(shorts, 3, 4, 7) + 1))
