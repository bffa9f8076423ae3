"""Matrices of torchao in safetensors files: `NAME._weight_qdata` and the tensors beside it.

Four layouts can be read: integers unpacked to int8 (N, K) with scales and zero points (N, G); two
4-bit integers per byte (N, K / 2), low nibble first, centred on 0, with scales and offsets (G, N);
int8 (N, K) and float8 (N, K) with scales per row, per matrix or per block. Other layouts are
specific to one kernel. Source: torchao 0.18, `prototype/safetensors` and
`quantization/quantize_/workflows`.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.fp8 import fp8
from sylvan.runtime.models.formats.stored import Tensors, check_scales, of_integers

_WEIGHT = ".weight"
_DATA, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_PREPARED = "._weight_act_pre_scale"
_IDLE = ("._weight_act_quant_scale", "._weight_act_quant_zero_point")
_CONFIGS: Mapping[str, int] = {
    "Int4WeightOnlyConfig": 4,
    "IntxWeightOnlyConfig": 8,
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt4WeightConfig": 8,
    "Int8DynamicActivationIntxWeightConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
    "Int8StaticActivationInt8WeightConfig": 8,
    "Float8WeightOnlyConfig": 8,
    "Float8DynamicActivationFloat8WeightConfig": 8,
    "Float8StaticActivationFloat8WeightConfig": 8,
    "Float8DynamicActivationInt4WeightConfig": 4,
}
_WITH_ZEROS = (
    *("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig", "Int4WeightOnlyConfig"),
    *("Int8DynamicActivationInt4WeightConfig", "Float8DynamicActivationInt4WeightConfig"),
)
"""Configs whose matrices always have zero points."""
_MAX_BITS = 8


@dataclass(frozen=True, slots=True)
class TorchAo:
    """Settings of the checkpoint; the kind of each matrix follows from its tensors."""

    kind: str
    bits: int
    mixes: bool = True

    @property
    def name(self) -> str:
        return f"torchao, {self.kind}"

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        stem = name.removesuffix(_WEIGHT)
        if not name.endswith(_WEIGHT) or stem + _DATA not in there:
            return (name,)
        zeros = self.kind in _WITH_ZEROS or stem + _ZERO in there
        more = (_ZERO,) if zeros else ()
        more += (_PREPARED,) if stem + _PREPARED in there else ()
        return stem + _DATA, stem + _SCALE, *(stem + end for end in more)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        if parts[-1].endswith(_PREPARED):
            raise ConfigError(f"{parts[-1]!r} scales the layer's inputs, which is not supported")
        q, scale = tensor(parts[0]), check_scales(parts[1], tensor(parts[1]))
        if q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return fp8(parts, q, scale, _block(q, scale))
        if q.dtype != torch.int8 or q.dim() != 2:
            raise ConfigError(
                f"{parts[0]!r} is {list(q.shape)} of {q.dtype}, a layout that is specific to one "
                "kernel of torchao; plain int8, float8 and 4-bit layouts can be read"
            )
        if len(parts) == 2:
            return _symmetric(parts, q, scale)
        zero = tensor(parts[2])
        if zero.shape != scale.shape or scale.dim() != 2:
            raise ConfigError(
                f"{parts[2]!r} is {list(zero.shape)}, but there are {list(scale.shape)} scales"
            )
        by_group = scale.shape[1] == len(q) and zero.is_floating_point()
        if by_group and (self.bits == 4 or scale.shape[0] != len(q)):
            return _pairs(parts, q, scale, check_scales(parts[2], zero))
        return _unpacked(parts, q, scale, zero)


def _block(q: torch.Tensor, scale: torch.Tensor) -> tuple[int, int] | None:
    """Outputs and inputs of a scale, where they are more than a row."""
    if q.dim() != 2 or scale.dim() != 2 or 0 in scale.shape:
        return None
    return -(-q.shape[0] // scale.shape[0]), -(-q.shape[1] // scale.shape[1])


def _group(parts: Sequence[str], cols: int, groups: int) -> int:
    """Inputs of a group; 0: all of them."""
    if groups < 1 or cols % groups:
        raise ConfigError(f"{parts[0]!r} has {cols} inputs, which {groups} groups do not divide")
    return 0 if groups == 1 else cols // groups


def _symmetric(parts: Sequence[str], q: torch.Tensor, scale: torch.Tensor) -> CodedWeight:
    rows = scale.reshape(-1, scale.shape[-1]) if scale.dim() else scale.reshape(1, 1)
    if rows.shape[0] == 1 and rows.shape[1] == len(q):
        rows = rows.T
    if rows.shape == (1, 1):
        rows = rows.expand(len(q), 1)
    if len(rows) != len(q):
        raise ConfigError(f"{parts[1]!r} is {list(scale.shape)}, but {parts[0]!r} {list(q.shape)}")
    group = _group(parts, q.shape[1], rows.shape[1])
    return of_integers(q.view(torch.uint8) ^ 128, rows, None, _MAX_BITS, group=group)


def _unpacked(
    parts: Sequence[str], q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> CodedWeight:
    if len(scale) != len(q):
        raise ConfigError(f"{parts[1]!r} is {list(scale.shape)}, but {parts[0]!r} {list(q.shape)}")
    group = _group(parts, q.shape[1], scale.shape[1])
    bits = 4 if int(q.min()) >= -8 and int(q.max()) < 8 else _MAX_BITS
    middle = 1 << bits - 1
    levels = (q.short() + middle).to(torch.uint8)
    if zero.is_floating_point():
        made = of_integers(levels, scale, None, bits, group=group)
        return _shifted(made, -(check_scales(parts[2], zero).float() * scale.float()))
    if zero.dtype != torch.int8:
        raise ConfigError(f"{parts[2]!r} is of {zero.dtype}; expected int8 or floating point")
    shifted = zero.short() + middle
    if int(shifted.min()) < 0 or int(shifted.max()) > 255:
        raise ConfigError(f"{parts[2]!r} has zero points that {bits} bits do not hold")
    return of_integers(levels, scale, shifted.to(torch.uint8), bits, group=group)


def _pairs(
    parts: Sequence[str], q: torch.Tensor, scale: torch.Tensor, added: torch.Tensor
) -> CodedWeight:
    """Two numbers of -8 to 7 in a byte; w = number scale + added."""
    group = _group(parts, q.shape[1] * 2, len(scale))
    codes = (q.view(torch.uint8) ^ 0x88).contiguous()  # around 8
    if not group:
        raise ConfigError(f"{parts[1]!r} is {list(scale.shape)}; expected several groups")
    made = CodedWeight(codes, scale.T.contiguous(), "int4", group)
    return _shifted(made, added.T.float())


def _shifted(weight: CodedWeight, shift: torch.Tensor) -> CodedWeight:
    """With what is added to each group, unless it is nothing."""
    if not shift.any():
        return weight
    group = weight.group or weight.shape[-1]
    return CodedWeight(
        weight.q, weight.scale, weight.code, group, weight.zero, shift.contiguous(), weight.order
    )


def torchao(settings: Mapping[str, Any]) -> TorchAo:
    """The format of `quant_method` torchao.

    Raises:
        ConfigError: a config that is not known; names the field.
    """
    found = settings.get("quant_type")
    if isinstance(found, dict):
        found = found.get("default", found)
    kind = found.get("_type") if isinstance(found, dict) else found
    inner = found.get("_data") if isinstance(found, dict) else None
    if kind in ("ModuleFqnToConfig", "FqnToConfig") and isinstance(inner, dict):
        return TorchAo("a config for each layer", 8)
    if kind not in _CONFIGS:
        raise ConfigError(
            f"config.json: quantization_config.quant_type is {str(kind)!r}; {', '.join(_CONFIGS)} "
            "and ModuleFqnToConfig can be read"
        )
    return TorchAo(str(kind), _CONFIGS[str(kind)])
