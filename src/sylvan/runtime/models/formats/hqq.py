"""HQQ: integers with a floating-point zero point and scale for each group of inputs.

`NAME.W_q` holds levels of the matrix, reshaped to one row a group (R, group), packed along those
rows: a byte has the level of row r in its highest bits, of r + R / 2 (r + R / 4 and so on) below; 3
bits lie ten in an int32 word. `NAME.zero` and `NAME.scale` are (R, 1): w = (level - zero) scale.
`NAME.nbits`, `NAME.shape` and others repeat the settings as tensors. Layout: hqq 0.2, `core/`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.codes import paired
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.stored import Tensors, check_scales, check_whole, number

_WEIGHT = ".weight"
_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (16, 32, 64, 128, 256, 512, 1024)
_IDLE = (
    *(".nbits", ".group_size", ".axis", ".packing", ".unpack_view_dtype", ".view_as_float"),
    *(".compute_dtype", ".quant_zero", ".quant_scale", ".channel_wise", ".optimize"),
    *(".round_zero", ".offload_meta", ".encoded_state_dict", ".stores_quant_config"),
)
_MIDDLE = 128


@dataclass(frozen=True, slots=True)
class Hqq:
    """Bits and inputs of a group of most layers; the tensors of each say its own."""

    bits: int
    group: int
    mixes: bool = True

    @property
    def name(self) -> str:
        return f"HQQ, {self.bits} bits in groups of {self.group}"

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        stem = name.removesuffix(_WEIGHT)
        if not name.endswith(_WEIGHT) or stem + ".W_q" not in there:
            return (name,)
        return tuple(stem + end for end in (".W_q", ".scale", ".zero", ".shape", ".nbits"))

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        packed = tensor(parts[0])
        scale, zero = (check_scales(part, tensor(part)).float().flatten() for part in parts[1:3])
        rows, cols = check_whole(parts[3], tensor(parts[3]), 2)
        (size,), count = check_whole(parts[4], tensor(parts[4]), 1), scale.numel()
        if size not in _BITS or zero.numel() != count or not count or (rows * cols) % count:
            raise ConfigError(
                f"{parts[0]!r} has {size} bits, {count} scales and {zero.numel()} zero points for "
                f"{rows} x {cols} numbers"
            )
        group = rows * cols // count
        if group not in _GROUPS or cols % group:
            raise ConfigError(
                f"{parts[0]!r} has {count} groups of {group} for {rows} x {cols}; groups along the "
                "inputs (axis 1) of 16 to 1024 can be read, which divide a row"
            )
        levels = _levels(parts[0], packed, size, count, group).view(rows, cols)
        scale, shift = scale.view(rows, -1), -(zero * scale).view(rows, -1)
        if size <= 4:
            return CodedWeight(paired(levels), scale, "uint4", group, shift=shift)
        shift = shift + _MIDDLE * scale  # codes of 8 bits are around their middle
        return CodedWeight(levels, scale, "int8", group, shift=shift)


def _levels(name: str, packed: torch.Tensor, bits: int, count: int, group: int) -> torch.Tensor:
    """Levels by group, uint8 (count, group).

    Raises:
        ConfigError: `packed` is of another type or size.
    """
    width, each, kind = (
        (3, 10, torch.int32) if bits == 3 else (bits if bits < 5 else 8, 8 // bits, torch.uint8)
    )
    if packed.is_floating_point():  # `view_as_float`
        packed = packed.contiguous().view(kind)
    steps = -(-count // each)
    if packed.dtype != kind or packed.shape != (steps, group):
        raise ConfigError(
            f"{name!r} is {list(packed.shape)} of {packed.dtype}; {bits} bits of {count} groups of "
            f"{group} are {[steps, group]} of {kind}"
        )
    places = [width * (each - 1 - i) for i in range(each)]
    levels = torch.cat([packed.int() >> place & (1 << width) - 1 for place in places])[:count]
    return levels.to(torch.uint8).contiguous()


def hqq(settings: Mapping[str, Any]) -> Hqq:
    """The format of `quant_method` hqq.

    Raises:
        ConfigError: another axis, or scales that are quantised too; names the field.
    """
    found = settings.get("quant_config") or {}
    found = found if isinstance(found, dict) else {}
    weights = found.get("weight_quant_params")
    if not isinstance(weights, dict):  # settings of single layers: those of the first
        inner = (part for part in found.values() if isinstance(part, dict))
        weights = next((part.get("weight_quant_params", part) for part in inner), {})
    axis = weights.get("axis", 1)
    if axis != 1:
        raise ConfigError(
            f"config.json: quantization_config.quant_config.axis is {axis!r}; groups along the "
            "inputs (axis 1) can be read"
        )
    for field in ("scale_quant_params", "zero_quant_params"):
        if found.get(field):
            raise ConfigError(
                f"config.json: quantization_config.quant_config.{field} is set; scales and zero "
                "points that are quantised themselves cannot be read"
            )
    return Hqq(number(weights, "nbits", _BITS), number(weights, "group_size", _GROUPS))
