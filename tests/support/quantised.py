"""Quantised checkpoints by the published layouts, number by number, and the weights they stand for.

The levels are random: what counts is that readers give back these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7  # which output each nibble of a word is


@dataclass(frozen=True)
class Stored:
    """Tensors of one matrix by the ends of their names, and its numbers (N, K)."""

    parts: Tensors
    numbers: torch.Tensor


def words(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of levels as int32 words, each level behind the one before, in plain Python."""
    out = torch.zeros(len(levels), -(-levels.shape[1] * bits // 32), dtype=torch.int32)
    for row, some in enumerate(levels.tolist()):
        whole = sum(level << bits * place for place, level in enumerate(some))
        for word in range(out.shape[1]):
            value = whole >> 32 * word & 0xFFFFFFFF
            out[row, word] = value - (1 << 32) if value >> 31 else value
    return out


def gptq(
    shape: tuple[int, int],
    seed: int,
    *,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = True,
    ordered: bool = False,
    less: int = 1,
) -> Stored:
    """A matrix in the layout of GPTQ; `less` is taken from zero points."""
    (outputs, inputs), generator = shape, torch.Generator().manual_seed(seed)
    groups = 1 if group < 0 else inputs // group
    of_input = torch.arange(inputs) // (inputs // groups)
    if ordered:  # the same for all matrices of as many inputs, as where they read the same rows
        of_input = of_input[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    most = 1 << bits
    levels = torch.randint(0, most, (outputs, inputs), generator=generator)
    zero = torch.full((outputs, groups), most // 2)
    if not symmetric:
        zero = torch.randint(1, most, (outputs, groups), generator=generator)
    scale = ((torch.rand(outputs, groups, generator=generator) + 0.5) * 0.1 / most).half()
    parts = {
        "qweight": words(levels, bits).T.contiguous(),
        "qzeros": words((zero - less).T, bits),
        "scales": scale.T.contiguous(),
        "g_idx": of_input.int(),
    }
    numbers = (levels - zero[:, of_input]) * scale.float()[:, of_input]
    return Stored(parts, numbers)


def awq(shape: tuple[int, int], seed: int, *, group: int = 64) -> Stored:
    """A matrix in the GEMM layout of AWQ."""
    (outputs, inputs), generator = shape, torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zero = torch.randint(0, 16, (outputs, inputs // group), generator=generator)
    scale = ((torch.rand(zero.shape, generator=generator) + 0.5) * 0.005).half()

    def packed(columns: torch.Tensor) -> torch.Tensor:
        return words(columns.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

    parts = {"qweight": packed(levels.T), "qzeros": packed(zero.T), "scales": scale.T.contiguous()}
    of_input = torch.arange(inputs) // group
    return Stored(parts, (levels - zero[:, of_input]) * scale.float()[:, of_input])


def fp8(shape: tuple[int, int], seed: int, *, block: int = 0, rows: bool = False) -> Stored:
    """A matrix of e4m3 numbers with a scale, scales of rows, or of blocks."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 50).to(E4M3)
    sizes = tuple(-(-n // block) for n in shape) if block else (shape[0], 1) if rows else ()
    scale = (torch.rand(sizes, generator=generator) + 0.5) * 1e-3
    whole = scale
    if block:
        whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        whole = whole[: shape[0], : shape[1]]
    end = "weight_scale_inv" if block else "weight_scale"
    return Stored({"weight": weight, end: scale}, weight.float() * whole)


def nvfp4(shape: tuple[int, int], seed: int) -> Stored:
    """Bytes of two e2m1 numbers with e4m3 scales of 16 inputs and one of the matrix."""
    (outputs, inputs), generator = shape, torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = sizes[codes & 7] * (1 - 2 * (codes >> 3))
    scale = (torch.rand(outputs, inputs // 16, generator=generator) * 400 + 1).to(E4M3)
    second = torch.tensor(1e-4)
    weight = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    parts = {"weight": weight, "weight_scale": scale, "weight_scale_2": second}
    return Stored(parts, values * (scale.float() * second).repeat_interleave(16, 1))


CASES: Mapping[str, tuple[Callable[..., Stored], Mapping[str, Any], Mapping[str, Any]]] = {
    "gptq": (gptq, {}, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}),
    "gptq-order-asym": (
        gptq,
        {"group": 32, "symmetric": False, "ordered": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    ),
    "gptq-v2-asym": (
        gptq,
        {"group": 128, "symmetric": False, "less": 0},
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "gptq-2": (gptq, {"bits": 2}, {"quant_method": "gptq", "bits": 2, "group_size": 64}),
    "gptq-3": (
        gptq,
        {"bits": 3, "symmetric": False},
        {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False},
    ),
    "gptq-8": (
        gptq,
        {"bits": 8, "group": -1},
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
    ),
    "auto-round": (
        gptq,
        {"less": 0},
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 64,
            "packing_format": "auto_round",
        },
    ),
    "awq": (
        awq,
        {},
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    ),
    "fp8-block": (
        fp8,
        {"block": 128},
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "fp8-tensor": (fp8, {}, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-rows": (fp8, {"rows": True}, {"quant_method": "fbgemm_fp8"}),
    "modelopt-fp8": (fp8, {}, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": (nvfp4, {}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
"""What makes a matrix, with which arguments, and what config.json says of it."""
