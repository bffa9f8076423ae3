"""FP8 (e4m3) weights with a scale for a matrix, an output or a block; NVFP4, MXFP8 by ModelOpt.

`NAME.weight` is float8_e4m3fn (N, K) and its scales are `NAME.weight_scale_inv`, as DeepSeek and
transformers write them, or `NAME.weight_scale`: w = weight * scale in both. Scales of what layers
read (`input_scale`, `activation_scale`) are not needed: rows stay in the type of the model.
NVFP4 is bytes of two numbers (E2M1) with e4m3 scales of 16 inputs and `NAME.weight_scale_2`.
Experts of DeepSeek V4 are MXFP4 beside FP8; all its scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.microscaling import mxfp4, mxfp8, powers_of
from sylvan.runtime.models.formats.stored import Tensors, check_scales

_WEIGHT = ".weight"
_SCALES = ("_scale_inv", "_scale")
_SECOND = "_scale_2"
_IDLE = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")
_NAN = 127


@dataclass(frozen=True, slots=True)
class Fp8:
    """Scales of matrices, outputs, or blocks (outputs, inputs)."""

    method: str
    block: tuple[int, int] | None = None
    bits: int = 8

    @property
    def name(self) -> str:
        if self.bits == 4:
            return f"{self.method} NVFP4 (e2m1 in groups of 16)"
        blocks = f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else ""
        return f"{self.method} FP8 (e4m3){blocks}"

    @property
    def mixes(self) -> bool:
        return False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        scale = next((name + end for end in _SCALES if name + end in there), None)
        if not name.endswith(_WEIGHT) or scale is None or name not in there:
            return (name,)
        return (name, scale, name + _SECOND) if name + _SECOND in there else (name, scale)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        weight, scale = tensor(parts[0]), tensor(parts[1])
        if scale.dtype == torch.uint8:
            return mxfp8(parts, weight, scale)
        if weight.dtype == torch.int8:
            return mxfp4(parts, weight.view(torch.uint8), scale)
        if scale.dtype == torch.float8_e8m0fnu:
            scale = powers_of(parts[1], scale)
        scale = check_scales(parts[1], scale)
        if len(parts) == 3:
            second = check_scales(parts[2], tensor(parts[2]))
            return nvfp4(parts, weight, scale, second.float())
        return fp8(parts, weight, scale, self.block)


def fp8(
    parts: Sequence[str],
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] | None,
) -> CodedWeight:
    """A matrix of e4m3 numbers and its scales, of one of the known shapes.

    Raises:
        ConfigError: another type or shape, or NaN; names the tensor.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ConfigError(
            f"{parts[0]!r} is {list(weight.shape)} of {weight.dtype}; expected a matrix of "
            "float8_e4m3fn"
        )
    rows, cols = weight.shape
    q = weight.view(torch.uint8).clone()
    if ((q & _NAN) == _NAN).any():
        raise ConfigError(f"the weights of {parts[0]!r} are not finite (NaN)")
    scale = scale if scale.dtype in (torch.float16, torch.bfloat16) else scale.float()
    scale = scale[:, 0, :, 0] if scale.dim() == 4 else scale  # of blocks, as ModelOpt writes them
    if scale.numel() == 1:
        return CodedWeight(q, scale.reshape(1, 1).repeat(rows, 1), "fp8_e4m3", 0)
    if scale.numel() == rows and scale.shape in ((rows,), (rows, 1)):
        return CodedWeight(q, scale.reshape(rows, 1).clone(), "fp8_e4m3", 0)
    if block is not None and scale.shape == (-(-rows // block[0]), -(-cols // block[1])):
        by_row = scale.repeat_interleave(block[0], 0)[:rows].contiguous()
        return CodedWeight(q, by_row, "fp8_e4m3", block[1] if cols > block[1] else 0)
    blocks = f"blocks of {block[0]} x {block[1]}" if block else "no blocks"
    raise ConfigError(
        f"{parts[1]!r} is {list(scale.shape)}, but {parts[0]!r} {list(weight.shape)} with {blocks}"
    )


def nvfp4(
    parts: Sequence[str], weight: torch.Tensor, scale: torch.Tensor, second: torch.Tensor
) -> CodedWeight:
    """Bytes of two e2m1 numbers (N, K / 2), scales (N, K / 16), and one of all of them.

    Raises:
        ConfigError: another type or shape; names the tensor.
    """
    rows, half = weight.shape if weight.dim() == 2 else (0, 0)
    wanted = (rows, half // 8)
    if weight.dtype != torch.uint8 or scale.shape != wanted or second.numel() != 1:
        raise ConfigError(
            f"{parts[0]!r} is {list(weight.shape)} of {weight.dtype} with scales "
            f"{list(scale.shape)}; expected bytes with a scale for each eight"
        )
    return CodedWeight(weight.clone(), scale.float() * second.flatten(), "fp4_e2m1", 16)


def of_deepseek(settings: Mapping[str, Any]) -> Fp8:
    """The format of `quant_method` fp8 and fbgemm_fp8.

    Raises:
        ConfigError: another type of numbers, or blocks that are none; names the field.
    """
    kind = settings.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise ConfigError(f"config.json: quantization_config.fmt is {kind!r}; e4m3 can be read")
    block = settings.get("weight_block_size")
    if block is None:
        return Fp8("transformers" if settings.get("quant_method") == "fp8" else "FBGEMM")
    if not isinstance(block, list) or len(block) != 2 or not all(x in (32, 64, 128) for x in block):
        raise ConfigError(
            f"config.json: quantization_config.weight_block_size is {block!r}; expected two of "
            "32, 64 and 128"
        )
    return Fp8("DeepSeek", (block[0], block[1]))


_ALGORITHMS = {
    "FP8": 8,
    "FP8_PER_CHANNEL_PER_TOKEN": 8,
    "FP8_PB_WO": 8,
    "MXFP8": 8,
    "NVFP4": 4,
}
_MODELOPT_BLOCK = 128


def of_modelopt(settings: Mapping[str, Any]) -> Fp8:
    """The format of `quant_method` modelopt.

    Raises:
        ConfigError: an algorithm that is not known; names it.
    """
    algorithm = settings.get("quant_algo")
    found = [algorithm]
    if algorithm == "MIXED_PRECISION":  # the tensors of a layer identify its algorithm
        layers = settings.get("quantized_layers")
        found = [
            part.get("quant_algo") for part in (layers.values() if isinstance(layers, dict) else ())
        ]
    unknown = [name for name in found or [algorithm] if name not in _ALGORITHMS]
    if unknown:
        raise ConfigError(
            f"config.json: quantization_config.quant_algo is {unknown[0]!r}; "
            f"{', '.join(_ALGORITHMS)} and MIXED_PRECISION of these can be read"
        )
    blocks = (_MODELOPT_BLOCK, _MODELOPT_BLOCK) if "FP8_PB_WO" in found else None
    return Fp8("ModelOpt", blocks, min(_ALGORITHMS[str(name)] for name in found))
