"""Decodes codes of weights in PyTorch. The C++ side is `codes.h`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

Code = Literal["int4", "int8", "fp8_e4m3", "fp4_e2m1", "nf4", "uint4"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of a normal distribution, from appendix E of QLoRA (arXiv:2305.14314), as bfloat16
NF4 = (
    *(-1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.09130859375, 0.0),
    *(0.07958984375, 0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0),
)
_TABLES: Mapping[Code, tuple[float, ...]] = MappingProxyType(
    {
        "fp4_e2m1": (*E2M1, *(-x for x in E2M1)),
        "nf4": NF4,
        "int4": tuple(range(16)),
        "uint4": tuple(range(16)),
    }
)


def bits_of(code: Code) -> int:
    """Bits of one code."""
    return 4 if code in _TABLES else 8


def middle_of(code: Code) -> float:
    """Middle of the integer range; 0 for other codes."""
    return {"int4": 8.0, "int8": 128.0}.get(code, 0.0)


def nibbles(q: torch.Tensor) -> torch.Tensor:
    """The two numbers of each byte, the low one first. Shape: (..., K / 2) -> (..., K)."""
    return torch.stack((q & 15, q >> 4), -1).flatten(-2)


def paired(codes: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def values_of(q: torch.Tensor, code: Code) -> torch.Tensor:
    """Values of codes as float32, integers from 0 on. Shape: that of the matrix."""
    if code in _TABLES:
        return torch.tensor(_TABLES[code], dtype=torch.float32)[nibbles(q).int()]
    return q.view(torch.float8_e4m3fn).float() if code == "fp8_e4m3" else q.float()
