"""Decodes bytes of two 4-bit codes to the type of the rows; few instructions on NVIDIA GPUs.

Integers become the low mantissa bits of 128 (bfloat16) or 1024 (float16), as in FasterTransformer
and Marlin, and one instruction subtracts that number and the zero point. Other codes are looked up
in registers: `prmt` selects bytes from a table of eight, twice for a table of sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.matmul.codes import Code, table_of
from sylvan.kernels.matmul.triton_codes import values_of

TYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_assembled: Any = tl.inline_asm_elementwise  # whose text may be a constant of a kernel
_INTEGERS = ("int4", "uint4")
# Pairs of: one, and what code 0 becomes.
_MAGIC = {
    torch.bfloat16: (0x3F803F80, 0x43004300),
    torch.float16: (0x3C003C00, 0x64006400),
}


def _integers(dtype: torch.dtype) -> str:
    """PTX: four bytes ($4) to four numbers of low halves ($0, $1) and four of high ones ($2, $3).

    $5 and $6 are four numbers, minus the code that is to be 0 and what code 0 becomes.
    """
    one, magic = _MAGIC[dtype]
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    lines = [
        f"{{ .reg .b32 a, b, one; mov.b32 one, 0x{one:08X};",
        "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;",
    ]
    for low, out in (("a", "$0"), ("b", "$1")):
        lines.append(f"lop3.b32 {out}, {low}, 0x000F000F, 0x{magic:08X}, 0xEA;")
    lines.append("shr.b32 a, a, 4; shr.b32 b, b, 4;")
    for high, out in (("a", "$2"), ("b", "$3")):
        lines.append(f"lop3.b32 {out}, {high}, 0x000F000F, 0x{magic:08X}, 0xEA;")
    lines += [f"fma.rn.{kind} ${out}, ${out}, one, ${5 + out % 2};" for out in range(4)]
    return "\n".join([*lines, "}"])


def _looked_up(values: Sequence[float], dtype: torch.dtype) -> str:
    """PTX: the same by a table of the sixteen numbers; $5 and $6 are not read.

    The codes of two bytes are four selectors of `prmt`, whose fourth bits choose between halves.
    """
    bits = torch.tensor(values).to(dtype).view(torch.int16).tolist()
    lines = ["{ .reg .b32 select, choose, other, mask, low, high, x, y;"]
    lines.append("and.b32 select, $4, 0x77777777;")
    lines.append("shr.b32 choose, $4, 1; and.b32 choose, choose, 0x44444444;")
    for pair, outputs in enumerate(((0, 2), (1, 3))):
        if pair:
            lines.append("shr.b32 select, select, 16; shr.b32 choose, choose, 16;")
        lines.append("mov.b32 other, 0; prmt.b32 mask, other, 0xFFFFFFFF, choose;")
        for shift, name in ((0, "low"), (8, "high")):
            words = [
                sum((bits[8 * half + 4 * word + i] >> shift & 255) << 8 * i for i in range(4))
                for half in range(2)
                for word in range(2)
            ]
            first, second, third, fourth = (f"0x{word:08X}" for word in words)
            lines.append(f"mov.b32 x, {first}; prmt.b32 x, x, {second}, select;")
            lines.append(f"mov.b32 y, {third}; prmt.b32 y, y, {fourth}, select;")
            lines.append(f"lop3.b32 {name}, mask, y, x, 0xCA;")  # y where the mask has ones
        for out, order in zip(outputs, ("0x6240", "0x7351"), strict=True):
            lines.append(f"prmt.b32 ${out}, low, high, {order};")
    return "\n".join([*lines, "}"])


@cache
def assembly(code: Code, dtype: torch.dtype) -> str:
    """PTX for four bytes of a code of four bits, and rows of one of `TYPES`."""
    if code in _INTEGERS:
        return _integers(dtype)
    return _looked_up(table_of(code, torch.device("cpu")).tolist(), dtype)


@triton.jit
def halves(
    byte,
    zero,
    table_ptr,
    CODE: tl.constexpr,
    ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Numbers of the low and the high halves of bytes, by assembly if there is some.

    `zero`: zero points of their columns, float32, of the shape of the bytes if ZEROS.
    """
    half: tl.constexpr = DTYPE
    if PTX != "":
        if ZEROS:
            middle = zero
        else:
            middle = tl.zeros(byte.shape, tl.float32) + (8.0 if CODE == "int4" else 0.0)
        less = (-(128.0 if half == tl.bfloat16 else 1024.0) - middle).to(half)
        if half == tl.bfloat16:
            low, high = _assembled(
                PTX,
                "=&r,=&r,=&r,=&r,r,r,r",
                [byte, less],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            low, high = _assembled(
                PTX,
                "=&r,=&r,=&r,=&r,r,r,r",
                [byte, less],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
    else:
        raw = byte.to(tl.int32)
        low = values_of(raw & 15, table_ptr, CODE)
        high = values_of(raw >> 4, table_ptr, CODE)
        if ZEROS:
            more = (8.0 if CODE == "int4" else 0.0) - zero
            low, high = low + more, high + more
        low, high = low.to(DTYPE), high.to(DTYPE)
    return low, high
