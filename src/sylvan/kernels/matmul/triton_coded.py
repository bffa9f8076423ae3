"""Quantised linear layers on GPUs: selects a kernel by the number of rows.

Few rows: memory-bound, the codes are read once. More rows: tiles are dequantised in registers.
Prompts: the matrix is dequantised once, then multiplied by the library.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch

from sylvan.kernels.gpu.launch import arch_of
from sylvan.kernels.gpu.tiles import tile
from sylvan.kernels.matmul.codes import bits_of
from sylvan.kernels.matmul.triton_codes import expanded, tiled_linear
from sylvan.kernels.matmul.triton_few import FEW, HALVES, few_rows
from sylvan.kernels.matmul.triton_fp8 import fp8_linear, rounded
from sylvan.kernels.matmul.weights import CodedWeight

# Thresholds in rows, measured on an H100 with a matrix of 24,576 x 4,096
_FP8_ROWS = 64  # from here on FP8 units pay for rounding the rows
_EXPANDED = 65  # dequantising once costs less than for each tile of 64 rows
_FP8_GROUPS = 512  # the library's product on dequantised weights beats FP8 with group scales


def coded_linear(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    """X (..., K) times a quantised matrix, transposed, plus a bias."""
    outputs, inputs = weight.shape
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    flat = x.reshape(-1, inputs)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    y = x.new_empty(len(flat), outputs, dtype=torch.float32 if out_f32 else x.dtype)
    arch, halves = arch_of(x), x.dtype in HALVES
    if weight.fp8_inputs and halves:
        if len(flat) >= _FP8_ROWS and (weight.group == 0 or len(flat) < _FP8_GROUPS):
            return fp8_linear(flat, weight, bias, out_f32=out_f32).view(*x.shape[:-1], outputs)
        flat = rounded(flat, weight.group)
    if len(flat) <= FEW and halves:
        op = "few" if bits_of(weight.code) == 4 else "few bytes"
        sizes = tile(op, len(flat), x.element_size(), arch)
        few_rows(flat, weight, bias, y, sizes, ptx=arch.startswith("sm"))
    elif len(flat) >= _EXPANDED and halves and not out_f32:
        matrix = expanded(weight, x.dtype)
        y = torch.nn.functional.linear(flat, matrix, bias)
    else:
        tiled_linear(flat, weight, bias, y)
    return y.view(*x.shape[:-1], outputs)
