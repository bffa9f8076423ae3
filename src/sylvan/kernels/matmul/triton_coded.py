"""Linear layers of codes on GPUs: which kernel takes how many rows.

Few rows read the codes once, at the rate of the memory. More rows multiply tiles that are expanded
in registers. Prompts have so many that the matrix is expanded once, for the library's product.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch

from sylvan.kernels.gpu.launch import arch_of
from sylvan.kernels.gpu.tiles import tile
from sylvan.kernels.matmul.codes import bits_of
from sylvan.kernels.matmul.triton_codes import expanded, tiled_linear
from sylvan.kernels.matmul.triton_few import FEW, few_rows
from sylvan.kernels.matmul.triton_fp8 import fp8_linear, rounded
from sylvan.kernels.matmul.weights import CodedWeight

HALVES = (torch.bfloat16, torch.float16)
# Rows from which on another way is faster, by times of an H100 and a matrix of 24,576 x 4,096
_FP8_ROWS = 64  # 8-bit units pay for rounding the rows
_EXPANDED = 65  # writing the matrix costs less than expanding it for each tile of 64 rows
_FP8_GROUPS = 512  # expanded as well: the library's product beats that of 8-bit floats in groups


def coded_linear(
    x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, *, out_f32: bool
) -> torch.Tensor:
    """X (..., K) times a matrix of codes, transposed, plus a bias."""
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
