"""Quantised matrices times a few rows on NVIDIA and AMD GPUs, for decoding.

Reading the codes is the bottleneck; all other work must overlap with it. A tile of bytes yields two
tiles of weights, of even and of odd inputs, which are multiplied by the even and odd columns of the
rows, so nothing is interleaved. Codes are exact in the dtype of the rows. A group's sum is scaled
once, and a zero point is subtracted as zero point times sum of inputs. On NVIDIA GPUs one
instruction converts two integers, by placing their bits below those of 128 (bfloat16) or 1024
(float16), as FasterTransformer and Marlin do. Programs may share the inputs of an output (split-K);
a second kernel then adds their sums, in order.

Shapes: T rows, K inputs, N outputs, G groups of inputs, S splits of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch
from sylvan.kernels.gpu.tiles import Tile, ceil_div
from sylvan.kernels.matmul.triton_codes import codes_of, values_of
from sylvan.kernels.matmul.weights import CodedWeight

FEW = 16  # rows of a matrix instruction
_assembled: Any = tl.inline_asm_elementwise  # Any, because its text is a constant of a kernel
_STEPS = 4  # minimum steps over inputs per split: fewer do not pay for the sum
_SUM_BLOCK = 256
_TYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _nibbles(one: int, magic: int, less: int) -> str:
    """PTX that converts four bytes to four numbers of low nibbles and four of high nibbles.

    `one`, `magic` and `less` are packed pairs: 1, the number that code 0 becomes, and the negative
    of the number that the zero code becomes.
    """
    lines = [
        f"{{ .reg .b32 a, b, one, less; mov.b32 one, 0x{one:08X}; mov.b32 less, 0x{less:08X};",
        "prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;",
    ]
    for low, out in (("a", "$0"), ("b", "$1")):
        lines.append(f"lop3.b32 {out}, {low}, 0x000F000F, 0x{magic:08X}, 0xEA;")
    lines.append("shr.b32 a, a, 4; shr.b32 b, b, 4;")
    for high, out in (("a", "$2"), ("b", "$3")):
        lines.append(f"lop3.b32 {out}, {high}, 0x000F000F, 0x{magic:08X}, 0xEA;")
    kind = "bf16x2" if magic >> 16 == 0x4300 else "f16x2"
    lines += [f"fma.rn.{kind} ${out}, ${out}, one, less;" for out in range(4)]
    return "\n".join([*lines, "}"])


_ASSEMBLY: dict[tuple[str, torch.dtype], str] = {
    ("int4", torch.bfloat16): _nibbles(0x3F803F80, 0x43004300, 0xC308C308),
    ("uint4", torch.bfloat16): _nibbles(0x3F803F80, 0x43004300, 0xC300C300),
    ("int4", torch.float16): _nibbles(0x3C003C00, 0x64006400, 0xE408E408),
    ("uint4", torch.float16): _nibbles(0x3C003C00, 0x64006400, 0xE400E400),
}


@triton.jit
def _halves(byte, table_ptr, CODE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Numbers of the low and high nibbles of bytes; by assembly on NVIDIA GPUs."""
    half: tl.constexpr = DTYPE
    if PTX != "" and half == tl.bfloat16:
        low, high = _assembled(
            PTX,
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif PTX != "":
        low, high = _assembled(
            PTX, "=&r,=&r,=&r,=&r,r", [byte], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        raw = byte.to(tl.int32)
        low = values_of(raw & 15, table_ptr, CODE).to(DTYPE)
        high = values_of(raw >> 4, table_ptr, CODE).to(DTYPE)
    return low, high


@triton.jit
def _scaled(
    value,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    at,
    mask,
    CODE: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
):
    """Scaled weights of a tile that spans several groups, in the dtype of the numbers."""
    w = value.to(tl.float32)
    if ZEROS:
        middle = 8.0 if CODE == "int4" else (128.0 if CODE == "int8" else 0.0)
        w += middle - tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)
    w *= tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SHIFTS:
        w += tl.load(shift_ptr + at, mask=mask, other=0.0)
    return w.to(value.dtype)


@triton.jit(do_not_specialize=["rows"])
def few_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    zero_ptr,
    shift_ptr,
    table_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    inputs,
    groups,
    x_stride,
    share,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    CODE: tl.constexpr,
    FOUR: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFTS: tl.constexpr,
    AFTER: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
):
    """A tile of outputs over the inputs of one split; with FOUR, x has pairs of numbers as int32.

    With AFTER each step of INNER inputs lies in one group, whose sum is scaled afterwards.
    """
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    piece = tl.program_id(1)
    first = piece * share
    last = tl.minimum(first + share, inputs)
    row = tl.arange(0, ROWS)
    EACH: tl.constexpr = FOUR + 1
    k = tl.arange(0, INNER // EACH)
    real, wanted = row < rows, col < outputs
    width = inputs // EACH
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    q_at = q_ptr + col.to(tl.int64)[None, :] * width + k[:, None]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(first, last, INNER):
        byte_at = start // EACH
        x_mask, w_mask = real[:, None], wanted[None, :]
        if not WHOLE:
            inside = byte_at + k < width
            x_mask, w_mask = x_mask & inside[None, :], w_mask & inside[:, None]
        x = tl.load(x_at + byte_at, mask=x_mask, other=0)
        q = tl.load(q_at + byte_at, mask=w_mask, other=0)
        at = col[None, :] * groups
        if not AFTER:
            at = at + ((byte_at + k) * EACH // GROUP)[:, None]
        if FOUR:
            even = (x & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
            odd = (x >> 16).to(tl.int16).to(DTYPE, bitcast=True)
            low, high = _halves(q, table_ptr, CODE, DTYPE, PTX)
            if not AFTER:
                low = _scaled(low, scale_ptr, zero_ptr, shift_ptr, at, w_mask, CODE, ZEROS, SHIFTS)
                high = _scaled(
                    high, scale_ptr, zero_ptr, shift_ptr, at, w_mask, CODE, ZEROS, SHIFTS
                )
            part = tl.dot(even, low)
            part = tl.dot(odd, high, part)
            total = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1)
        else:
            w = values_of(q.to(tl.int32), table_ptr, CODE).to(DTYPE)
            if not AFTER:
                w = _scaled(w, scale_ptr, zero_ptr, shift_ptr, at, w_mask, CODE, ZEROS, SHIFTS)
            part = tl.dot(x, w)
            total = tl.sum(x.to(tl.float32), 1)
        if AFTER:
            group_at = col * groups + (start // GROUP if GROUP > 0 else 0)
            scale = tl.load(scale_ptr + group_at, mask=wanted, other=0.0).to(tl.float32)
            acc += part * scale[None, :]
            if ZEROS or SHIFTS:
                more = tl.zeros([COLS], tl.float32)
                if ZEROS:
                    middle = 8.0 if CODE == "int4" else (128.0 if CODE == "int8" else 0.0)
                    zero = tl.load(zero_ptr + group_at, mask=wanted, other=0).to(tl.float32)
                    more += (middle - zero) * scale
                if SHIFTS:
                    more += tl.load(shift_ptr + group_at, mask=wanted, other=0.0)
                acc += total[:, None] * more[None, :]
        else:
            acc += part
    if BIAS:
        acc += tl.load(bias_ptr + col, mask=wanted, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + (piece * rows + row).to(tl.int64)[:, None] * outputs + col[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & wanted[None, :])


@triton.jit
def _add_kernel(
    part_ptr,
    bias_ptr,
    y_ptr,
    count,
    outputs,
    BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all splits (S, T N) in order, plus a bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(SHARES):
        total += tl.load(part_ptr + piece * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def few_rows(
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sizes: Tile,
    *,
    ptx: bool,
) -> None:
    """Fill Y (T, N) with X (T, K) times a matrix; T <= `FEW`, float16 or bfloat16."""
    outputs, inputs = weight.shape
    tensors, constants = codes_of(weight)
    dtype = x.dtype
    if constants["FOUR"]:
        if x.stride(0) % 2 or x.storage_offset() % 2:
            x = x.contiguous()
        x = x.view(torch.int32)
    share = _share(outputs, inputs, sizes)
    shares = ceil_div(inputs, share)
    out = y if shares == 1 else y.new_empty(shares, *y.shape, dtype=torch.float32)
    launch(
        few_kernel,
        (ceil_div(outputs, sizes.cols), shares),
        x,
        *tensors,
        weight.q if bias is None or shares > 1 else bias,
        out,
        len(x),
        outputs,
        inputs,
        weight.scale.shape[-1],
        x.stride(0),
        share,
        BIAS=bias is not None and shares == 1,
        WHOLE=inputs % sizes.inner == 0,
        AFTER=after(weight, sizes),
        DTYPE=_TYPES[dtype],
        PTX=_ASSEMBLY.get((weight.code, dtype), "") if ptx else "",
        **constants,
        ROWS=sizes.rows,
        COLS=sizes.cols,
        INNER=sizes.inner,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    if shares > 1:
        launch(
            _add_kernel,
            (ceil_div(y.numel(), _SUM_BLOCK),),
            out,
            out if bias is None else bias,
            y,
            y.numel(),
            outputs,
            BIAS=bias is not None,
            SHARES=shares,
            BLOCK=_SUM_BLOCK,
        )


def _share(outputs: int, inputs: int, sizes: Tile) -> int:
    """Inputs per program: enough programs to fill the chip, but at least `_STEPS` steps each."""
    steps = ceil_div(inputs, sizes.inner)
    shares = max(1, min(steps // _STEPS, sizes.programs // ceil_div(outputs, sizes.cols)))
    return ceil_div(steps, shares) * sizes.inner


def after(weight: CodedWeight, sizes: Tile) -> bool:
    """Whether each step over inputs stays within a group, so that its sum can be scaled."""
    return weight.group == 0 or weight.group % sizes.inner == 0
