"""Writes quantised matrices in the published layouts, number by number, with their dequantised
weights.

The levels are random, because the tests check only that readers return these numbers.
"""

from __future__ import annotations

import json
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
    """Pack rows of levels into int32 words, each level after the one before, in plain Python."""
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
"""A quantising function with its arguments, and its entry in config.json."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)


def bitsandbytes4(
    shape: tuple[int, int], seed: int, *, kind: str = "nf4", double: bool = False, block: int = 64
) -> Stored:
    """Codes in bytes, the first in the upper half, and magnitudes of blocks."""
    (rows, cols), generator = shape, _generator(seed)
    table = torch.tensor(NF4 if kind == "nf4" else (*FP4, *(-x for x in FP4)))
    codes = torch.randint(0, 16, (rows * cols,), generator=generator)
    most = torch.rand(rows * cols // block, generator=generator) * 0.1 + 0.01
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
    parts: dict[str, torch.Tensor] = {"weight.absmax": most}
    if double:
        levels = torch.randint(0, 256, most.shape, generator=generator).to(torch.uint8)
        nested = torch.linspace(-1.0, 1.0, 256)
        sizes = torch.rand(-(-len(most) // 256), generator=generator) * 0.01
        most = nested[levels.int()] * sizes.repeat_interleave(256)[: len(most)] + 0.03
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        parts = {"weight.absmax": levels, "weight.nested_absmax": sizes}
        parts |= {"weight.nested_quant_map": nested}
    text = json.dumps(state | {"shape": list(shape)}).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    parts["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    parts["weight.quant_map"] = table
    numbers = _bfloat16(table, kind)[codes] * most.repeat_interleave(block)
    return Stored(parts, numbers.view(shape))


def _bfloat16(table: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that kernels multiply by: NF4's as bfloat16, FP4's in twelfths."""
    return table.bfloat16().float() if kind == "nf4" else (table * 12).bfloat16().float() / 12


def bitsandbytes8(shape: tuple[int, int], seed: int) -> Stored:
    """LLM.int8: int8 with the largest magnitude of each row."""
    generator = _generator(seed)
    q = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    most = torch.rand(shape[0], generator=generator) + 0.1
    parts = {"weight": q, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Stored(parts, q.float() * (most[:, None] / 127))


def hqq(shape: tuple[int, int], seed: int, *, bits: int = 4, group: int = 64) -> Stored:
    """Levels of groups below each other, packed along them, with real zero points."""
    (rows, cols), generator = shape, _generator(seed)
    count = rows * cols // group
    levels = torch.randint(0, 1 << bits, (count, group), generator=generator)
    scale = ((torch.rand(count, 1, generator=generator) + 0.5) * 0.1 / (1 << bits)).half()
    zero = (torch.rand(count, 1, generator=generator) * (1 << bits)).half()
    each, width, kind = (10, 3, torch.int32) if bits == 3 else (8 // bits, bits, torch.uint8)
    padded = torch.zeros(-(-count // each) * each, group, dtype=torch.int64)
    padded[:count] = levels
    packed = torch.zeros(len(padded) // each, group, dtype=torch.int64)
    for part in padded.split(len(packed)):
        packed = packed << width | part
    parts = {
        "W_q": packed.to(kind),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(shape),
        "nbits": torch.tensor(bits, dtype=torch.uint8),
        "axis": torch.tensor(1, dtype=torch.uint8),
    }
    shift = -(zero.float() * scale.float())
    numbers = levels * scale.float() + shift
    if bits == 8:
        numbers = (levels - 128) * scale.float() + (shift + 128 * scale.float())
    return Stored(parts, numbers.view(shape))


def torchao_int(
    shape: tuple[int, int], seed: int, *, bits: int = 4, group: int = 64, zeros: bool = False
) -> Stored:
    """IntxUnpackedToInt8Tensor."""
    (rows, cols), generator = shape, _generator(seed)
    half = 1 << bits - 1
    q = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    q[0, :2] = torch.tensor([-half, half - 1])
    size = rows, cols // group
    scale = (torch.rand(size, generator=generator) + 0.5) * 0.1 / half
    zero = torch.zeros(size, dtype=torch.int8)
    if zeros:
        zero = torch.randint(-half, half, size, generator=generator).to(torch.int8)
    numbers = (q.float().view(rows, -1, group) - zero[..., None].float()) * scale[..., None]
    parts = {"_weight_qdata": q, "_weight_scale": scale, "_weight_zero_point": zero}
    return Stored(parts, numbers.view(shape))


def torchao_int4(shape: tuple[int, int], seed: int, *, group: int = 64) -> Stored:
    """Int4Tensor: two numbers in a byte; scales and shifts by group and output."""
    (rows, cols), generator = shape, _generator(seed)
    q = torch.randint(-8, 8, shape, generator=generator)
    scale = ((torch.rand(cols // group, rows, generator=generator) + 0.5) * 0.01).bfloat16()
    added = (torch.randn(cols // group, rows, generator=generator) * 0.01).bfloat16()
    packed = (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    each = (x.T.float().repeat_interleave(group, 1) for x in (scale, added))
    numbers = q * next(each) + next(each)
    parts = {"_weight_qdata": packed, "_weight_scale": scale, "_weight_zero_point": added}
    return Stored(parts, numbers)


def torchao_rows(shape: tuple[int, int], seed: int, *, dtype: torch.dtype = torch.int8) -> Stored:
    """Int8Tensor or Float8Tensor with a scale for each output."""
    generator = _generator(seed)
    q = (torch.randn(shape, generator=generator) * 40).clamp(-127, 127)
    q = (q.round() if dtype == torch.int8 else q).to(dtype)
    scale = (torch.rand(shape[0], 1, generator=generator) + 0.5) * 1e-3
    return Stored({"_weight_qdata": q, "_weight_scale": scale}, q.float() * scale)


def microscaling(shape: tuple[int, int], seed: int, *, bits: int, end: str) -> Stored:
    """MXFP4 or MXFP8: numbers with a power of two for 32 inputs, as a byte of its exponent."""
    (rows, cols), generator = shape, _generator(seed)
    exponents = torch.randint(118, 124, (rows, cols // 32), generator=generator)
    powers = (exponents - 127).float().exp2().repeat_interleave(32, 1)
    if bits == 8:
        weight = torch.randn(shape, generator=generator).to(E4M3)
        parts = {"weight": weight, end: exponents.to(torch.uint8)}
        return Stored(parts, weight.float() * powers)
    codes = torch.randint(0, 16, shape, generator=generator)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = sizes[codes & 7] * (1 - 2 * (codes >> 3))
    weight = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return Stored({"weight": weight, end: exponents.to(torch.uint8)}, values * powers)


def block_int8(shape: tuple[int, int], seed: int, *, block: int = 0) -> Stored:
    """Int8 numbers with scales of rows or of blocks."""
    generator = _generator(seed)
    weight = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    sizes = tuple(-(-n // block) for n in shape) if block else (shape[0], 1)
    scale = (torch.rand(sizes, generator=generator) + 0.5) * 1e-3
    whole = scale
    if block:
        whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        whole = whole[: shape[0], : shape[1]]
    end = "weight_scale_inv" if block else "weight_scale"
    return Stored({"weight": weight, end: scale}, weight.float() * whole)


def mlx(shape: tuple[int, int], seed: int, *, bits: int = 4, group: int = 64) -> Stored:
    """Words of numbers without gaps, and scales and biases of groups."""
    (rows, cols), generator = shape, _generator(seed)
    levels = torch.randint(0, 1 << bits, shape, generator=generator)
    size = rows, cols // group
    scale = ((torch.rand(size, generator=generator) + 0.5) * 0.1 / (1 << bits)).half()
    bias = (torch.randn(size, generator=generator) * 0.05).half()
    parts = {"weight": words(levels, bits).view(torch.uint32), "scales": scale, "biases": bias}
    each = (x.float().repeat_interleave(group, 1) for x in (scale, bias))
    numbers = levels * next(each) + next(each)
    if bits > 4:
        shift = bias.float() + 128 * scale.float()
        by_input = (x.repeat_interleave(group, 1) for x in (scale.float(), shift))
        numbers = (levels - 128) * next(by_input) + next(by_input)
    return Stored(parts, numbers)


def _torchao(kind: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}


def _hqq(bits: int, group: int) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": group, "axis": 1, "channel_wise": True}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}


def _quark(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "symmetric": True} | more
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
TOOLS: Mapping[str, tuple[Callable[..., Stored], Mapping[str, Any], Mapping[str, Any]]] = {
    "bnb-nf4": (bitsandbytes4, {}, _BNB4 | {"bnb_4bit_quant_type": "nf4"}),
    "bnb-nf4-double": (
        bitsandbytes4,
        {"double": True},
        _BNB4 | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "bnb-fp4": (
        bitsandbytes4,
        {"kind": "fp4", "block": 128},
        _BNB4 | {"bnb_4bit_quant_type": "fp4"},
    ),
    "bnb-int8": (bitsandbytes8, {}, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "hqq-4": (hqq, {}, _hqq(4, 64)),
    "hqq-3": (hqq, {"bits": 3, "group": 32}, _hqq(3, 32)),
    "hqq-8": (hqq, {"bits": 8, "group": 128}, _hqq(8, 128)),
    "torchao-intx": (torchao_int, {}, _torchao("IntxWeightOnlyConfig")),
    "torchao-8da4w": (
        torchao_int,
        {"group": 32, "zeros": True},
        _torchao("Int8DynamicActivationIntxWeightConfig"),
    ),
    "torchao-int4": (torchao_int4, {}, _torchao("Int4WeightOnlyConfig")),
    "torchao-int8": (torchao_rows, {}, _torchao("Int8WeightOnlyConfig")),
    "torchao-fp8": (torchao_rows, {"dtype": E4M3}, _torchao("Float8WeightOnlyConfig")),
    "quark-fp8": (fp8, {}, _quark("fp8_e4m3", "per_tensor")),
    "quark-mxfp4": (
        microscaling,
        {"bits": 4, "end": "weight_scale"},
        _quark("fp4", "per_group", group_size=32, scale_format="e8m0"),
    ),
    "modelopt-mxfp8": (
        microscaling,
        {"bits": 8, "end": "weight_scale"},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    "mxfp8": (
        microscaling,
        {"bits": 8, "end": "weight_scale_inv"},
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    ),
    "blockwise-int8": (
        block_int8,
        {"block": 128},
        {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
    ),
    "w8a8-int8": (block_int8, {}, {"quant_method": "w8a8_int8"}),
    **{
        f"mlx-{bits}": (
            mlx,
            {"bits": bits, "group": group},
            {"quant_method": "mlx", "bits": bits, "group_size": group},
        )
        for bits, group in ((2, 32), (3, 64), (4, 64), (6, 128), (8, 32))
    },
}
"""Further tools, as `CASES`."""
