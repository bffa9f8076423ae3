"""Random quantised matrices, of each kind that kernels support."""

from __future__ import annotations

import torch

from sylvan.kernels.matmul.codes import Code, bits_of
from sylvan.kernels.matmul.weights import CodedWeight

KINDS: dict[str, tuple[Code, int, torch.dtype, bool]] = {
    "int4 g32": ("int4", 32, torch.float16, False),
    "int4 g64 bf16": ("int4", 64, torch.bfloat16, False),
    "int4 g128 zeros": ("int4", 128, torch.float16, True),
    "int4 f32 zeros": ("int4", 0, torch.float32, True),
    "int8 g128": ("int8", 128, torch.float16, False),
    "int8 zeros": ("int8", 0, torch.float32, True),
    "fp8": ("fp8_e4m3", 0, torch.float32, False),
    "fp8 blocks": ("fp8_e4m3", 128, torch.float32, False),
    "nvfp4": ("fp4_e2m1", 16, torch.float32, False),
    "nf4": ("nf4", 64, torch.float32, False),
    "uint4 g32 shifts": ("uint4", 32, torch.float32, False),
    "iq4_nl g32": ("iq4_nl", 32, torch.float16, False),
    "int8 g16 shifts": ("int8", 16, torch.float16, False),
    "int6 g16 shifts": ("int6", 16, torch.float16, False),
    "int6 g64": ("int6", 64, torch.bfloat16, False),
}
"""Code, inputs of a scale (0: a row), type of scales, and whether there are zero points.

Names tell of shifts.
"""

STEPPED: dict[str, tuple[Code, int, bool]] = {
    "Q2_K": ("uint4", 16, True),
    "Q3_K": ("int4", 16, False),
    "Q4_K": ("uint4", 32, True),
    "Q5_K": ("int6", 32, True),
    "Q6_K": ("int6", 16, False),
    "IQ4_XS": ("iq4_nl", 32, False),
}
"""Kinds of GGUF with steps of scales: their codes here, inputs of a scale, and whether shifted."""


def stepped(kind: str, rows: int, cols: int, *, seed: int = 1) -> CodedWeight:
    """Return a matrix of one of `STEPPED`; `cols` is a multiple of 256."""
    code, group, shifts = STEPPED[kind]
    generator = torch.Generator().manual_seed(seed)

    def counts(low: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.randint(low, 128, (rows, cols // group), generator=generator)
        steps = torch.randn(rows, cols // 256, generator=generator) * 1e-3
        return found.to(torch.int8), steps.half()

    most = 64 if code == "int6" else 256
    q = torch.randint(0, most, (rows, cols * bits_of(code) // 8), generator=generator)
    scale, step = counts(-128)
    shift, shift_step = counts(0) if shifts else (None, None)
    return CodedWeight(
        q.to(torch.uint8),
        scale,
        code,
        group,
        shift=shift,
        step=step,
        shift_step=shift_step,
    )


def coded(
    kind: str, rows: int, cols: int, *, group: int | None = None, seed: int = 1
) -> CodedWeight:
    """Return a matrix of one of `KINDS`, or of a code with other groups."""
    found = KINDS[kind] if kind in KINDS else next(k for k in KINDS.values() if k[0] == kind)
    code, size, scale, zeros = found
    size = size if group is None else group
    generator = torch.Generator().manual_seed(seed)
    bits = bits_of(code)
    q = torch.randint(0, 256, (rows, cols * bits // 8), dtype=torch.uint8, generator=generator)
    if code == "fp8_e4m3":
        q[(q & 127) == 127] = 1
    if code == "int6":
        q &= 63
    shape = rows, -(-cols // size) if size else 1
    scales = (torch.rand(shape, generator=generator) * 0.1 + 0.01).to(scale)
    zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    shift = torch.randn(shape, generator=generator) * 0.1 if kind.endswith("shifts") else None
    return CodedWeight(q, scales, code, size, zero if zeros else None, shift)
