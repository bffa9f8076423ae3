"""Decodes quantised weights in PyTorch. The C++ side is `codes.h`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch

Code = Literal[
    "int4",
    "int8",
    "int6",
    "fp8_e4m3",
    "fp4_e2m1",
    "nf4",
    "uint4",
    "fp4_bnb",
    "iq4_nl",
    "iq3_xxs",
    "iq3_s",
    "iq2",
]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of a normal distribution, from appendix E of QLoRA (arXiv:2305.14314), as bfloat16
NF4 = (
    *(-1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.0908203125, 0.0),
    *(0.07958984375, 0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0),
)
FP4_BNB = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""The non-negative numbers of bitsandbytes' FP4, times 12 so that they are exact."""
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
IQ2 = (8, 25, 43, 1, 7, 9, 0, 0)
"""Magnitudes of ggml's IQ2 grids, then eight times those of its IQ1 grids."""


def _signed(sizes: Sequence[float]) -> tuple[float, ...]:
    return *sizes, *(-x for x in sizes)


_TABLES: Mapping[Code, tuple[float, ...]] = MappingProxyType(
    {
        "fp4_e2m1": _signed(E2M1),
        "nf4": NF4,
        "int4": tuple(range(16)),
        "uint4": tuple(range(16)),
        "fp4_bnb": _signed(FP4_BNB),
        "iq4_nl": IQ4_NL,
        "iq3_xxs": _signed(IQ3_XXS),
        "iq3_s": _signed(IQ3_S),
        "iq2": _signed(IQ2),
    }
)


@cache
def table_of(code: Code, device: torch.device) -> torch.Tensor:
    """Values of the 16 four-bit codes, float32; cached, so that graphs contain no copy."""
    return torch.tensor(_TABLES[code], dtype=torch.float32, device=device)


def bits_of(code: Code) -> int:
    """Bits of one code in a `CodedWeight`."""
    return 4 if code in _TABLES else 8


def packed_bits_of(code: Code) -> int:
    """Bits of one code in kernel order."""
    return 6 if code == "int6" else bits_of(code)


def middle_of(code: Code) -> float:
    """Middle of the integer range; 0 for other codes."""
    return {"int4": 8.0, "int6": 32.0, "int8": 128.0}.get(code, 0.0)


def nibbles(q: torch.Tensor) -> torch.Tensor:
    """The two nibbles of each byte, low one first. Shape: (..., K / 2) -> (..., K)."""
    return torch.stack((q & 15, q >> 4), -1).flatten(-2)


def paired(codes: torch.Tensor) -> torch.Tensor:
    """The inverse, for uint8."""
    pairs = codes.clone(memory_format=torch.contiguous_format).view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def values_of(q: torch.Tensor, code: Code) -> torch.Tensor:
    """Values of codes as float32; integers start at 0. Shape: that of the matrix."""
    if code in _TABLES:
        return table_of(code, q.device)[nibbles(q).int()]
    return q.view(torch.float8_e4m3fn).float() if code == "fp8_e4m3" else q.float()


def widened(q: torch.Tensor, code: Code, to: Code) -> tuple[torch.Tensor, float] | None:
    """Map codes to integers of more bits; return them and the divisor of the scale.

    None: 8-bit integers cannot express the ratios of these codes.
    """
    if code in ("nf4", "fp4_bnb", "fp8_e4m3"):
        return None
    times = 2.0 if code == "fp4_e2m1" else 1.0
    levels = values_of(q, code) * times - middle_of(code) + middle_of(to)
    return levels.to(torch.uint8), times
