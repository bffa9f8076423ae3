"""Rounds matrices to microscaling formats and blockwise FP8.

Formats: OCP Microscaling Formats (MX) 1.0; NVFP4 as ModelOpt and compressed-tensors store it; FP8
in blocks as DeepSeek-V3 has it.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from sylvan.kernels.matmul.codes import E2M1, paired
from sylvan.kernels.matmul.weights import CodedWeight

MX_GROUP, NVFP4_GROUP, FP8_BLOCK = 32, 16, 128
_E4M3, _E2M1 = 448.0, 6.0
_E4M3_EXPONENT, _E2M1_EXPONENT = 8, 2  # of the largest numbers
_MIN_EXPONENT = -127


def quantise_fp8_blocks(weight: torch.Tensor) -> CodedWeight:
    """Round to e4m3 with a scale per block of 128 outputs x 128 inputs."""
    rows, cols = weight.shape
    whole = torch.zeros(-(-rows // FP8_BLOCK) * FP8_BLOCK, -(-cols // FP8_BLOCK) * FP8_BLOCK)
    whole[:rows, :cols] = weight.abs()
    blocks = whole.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = (blocks.amax((1, 3)) / _E4M3).clamp_min(1e-30)
    by_row = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].contiguous()
    each = by_row.repeat_interleave(FP8_BLOCK, 1)[:, :cols]
    group = FP8_BLOCK if cols > FP8_BLOCK else 0
    return CodedWeight(_e4m3(weight.float() / each), by_row, "fp8_e4m3", group)


def quantise_mxfp8(weight: torch.Tensor) -> CodedWeight:
    """Round to e4m3 with a power-of-two scale per 32 inputs (MXFP8)."""
    groups = weight.float().unflatten(1, (-1, MX_GROUP))
    powers = _powers(groups, _E4M3_EXPONENT)
    q = _e4m3(groups / powers[..., None]).flatten(1)
    return CodedWeight(q, powers.bfloat16(), "fp8_e4m3", MX_GROUP)


def quantise_mxfp4(weight: torch.Tensor) -> CodedWeight:
    """Round to e2m1 with a power-of-two scale per 32 inputs (MXFP4)."""
    groups = weight.float().unflatten(1, (-1, MX_GROUP))
    powers = _powers(groups, _E2M1_EXPONENT)
    q = paired(_e2m1(groups / powers[..., None]).flatten(1))
    return CodedWeight(q, powers.bfloat16(), "fp4_e2m1", MX_GROUP)


def round_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to NVFP4: bytes of two e2m1 numbers, e4m3 scales of 16 inputs, and a global divisor.

    Shapes: (N, K / 2), (N, K / 16), (1,) float32.
    """
    groups = weight.float().unflatten(1, (-1, NVFP4_GROUP))
    most = groups.abs().amax(2)
    whole = (_E4M3 * _E2M1 / most.max().clamp_min(1e-20)).reshape(1)
    scale = (most / _E2M1 * whole).clamp(2.0**-9, _E4M3).to(torch.float8_e4m3fn)
    each = scale.float() * (1 / whole)
    return paired(_e2m1(groups / each[..., None]).flatten(1)), scale, whole


def quantise_nvfp4(weight: torch.Tensor) -> CodedWeight:
    """Dequantise the result of `round_nvfp4`."""
    q, scale, whole = round_nvfp4(weight)
    return CodedWeight(q, scale.float() * (1 / whole), "fp4_e2m1", NVFP4_GROUP)


def exponents_of(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two as biased exponents (e8m0 bytes)."""
    return (torch.frexp(scale.float()).exponent - 1 + 127).to(torch.uint8)


def _powers(groups: torch.Tensor, exponent: int) -> torch.Tensor:
    """The power of two that scales a group's largest magnitude to the format's exponent."""
    most = groups.abs().amax(-1)
    found = torch.frexp(most).exponent - 1 - exponent
    found = torch.where(most > 0, found, 0).clamp(_MIN_EXPONENT + 1, 127)
    return torch.ldexp(torch.ones(most.shape), found)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Bytes of the nearest e4m3 numbers."""
    return x.clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


_BETWEEN = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest e2m1 numbers, ties to even; uint8, one per number."""
    size = x.abs().contiguous()
    upper = torch.searchsorted(_BETWEEN, size, right=True)
    lower = torch.searchsorted(_BETWEEN, size)
    tied = upper != lower  # halfway between two codes: take the even one
    code = torch.where(tied & (upper % 2 == 1), lower, upper).to(torch.uint8)
    return code | (x < 0).to(torch.uint8) << 3
