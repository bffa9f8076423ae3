"""INT8 weights with a scale for an output or a block, as DeepSeek's models are rounded for SGLang.

`NAME.weight` is int8 (N, K); its scales are `NAME.weight_scale_inv` of blocks, or
`NAME.weight_scale` (N, 1): w = weight * scale in both. Rows stay in the type of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.stored import Tensors, check_scales

_WEIGHT = ".weight"
_SCALES = ("_scale_inv", "_scale")
_IDLE = (".input_scale",)
_BLOCKS = (32, 64, 128)
_MIDDLE = 128


@dataclass(frozen=True, slots=True)
class BlockInt8:
    """Blocks (outputs, inputs), or a scale for each output."""

    block: tuple[int, int] | None = None
    bits: int = 8
    mixes: bool = False

    @property
    def name(self) -> str:
        return f"INT8 in blocks of {self.block[0]} x {self.block[1]}" if self.block else "INT8"

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        scale = next((name + end for end in _SCALES if name + end in there), None)
        whole = name.endswith(_WEIGHT) and scale is not None and name in there
        return (name, scale) if whole and scale else (name,)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        weight, scale = tensor(parts[0]), check_scales(parts[1], tensor(parts[1]))
        if weight.dtype != torch.int8 or weight.dim() != 2:
            raise ConfigError(
                f"{parts[0]!r} is {list(weight.shape)} of {weight.dtype}; expected a matrix of int8"
            )
        rows, cols = weight.shape
        q = (weight.to(torch.int16) + _MIDDLE).to(torch.uint8)
        if scale.shape in ((rows,), (rows, 1)):
            return CodedWeight(q, scale.float().reshape(rows, 1), "int8", 0)
        block = self.block
        if block is not None and scale.shape == (-(-rows // block[0]), -(-cols // block[1])):
            by_row = scale.float().repeat_interleave(block[0], 0)[:rows].contiguous()
            return CodedWeight(q, by_row, "int8", block[1] if cols > block[1] else 0)
        blocks = f"blocks of {block[0]} x {block[1]}" if block else "no blocks"
        raise ConfigError(
            f"{parts[1]!r} is {list(scale.shape)}, but {parts[0]!r} {list(weight.shape)} with "
            f"{blocks}"
        )


def of_int8(settings: Mapping[str, Any]) -> BlockInt8:
    """The format of `quant_method` blockwise_int8 and w8a8_int8.

    Raises:
        ConfigError: blocks that are none; names the field.
    """
    block = settings.get("weight_block_size")
    if block is None:
        return BlockInt8()
    if not isinstance(block, list) or len(block) != 2 or not all(x in _BLOCKS for x in block):
        raise ConfigError(
            f"config.json: quantization_config.weight_block_size is {block!r}; expected two of "
            "32, 64 and 128"
        )
    return BlockInt8((block[0], block[1]))
