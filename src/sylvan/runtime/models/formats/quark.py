"""Quark's common formats: float8 and int8 with scales of rows, of the matrix or of groups; MXFP4.

`NAME.weight` with `NAME.weight_scale`; MXFP4 is bytes of two numbers with bytes of exponents.
Groups of layers may differ. Layout: AMD Quark 0.13, files written with `pack_method` order or
reorder, which are the same for these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.fp8 import fp8
from sylvan.runtime.models.formats.microscaling import mxfp4
from sylvan.runtime.models.formats.stored import Tensors, check_scales, of_integers

_WEIGHT, _SCALE, _ZERO = ".weight", "_scale", "_zero_point"
_IDLE = (
    *(".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point"),
    *(".k_scale", ".v_scale", ".weight_zero_point"),
)
_KINDS = {"fp8_e4m3": 8, "int8": 8, "fp4": 4}
_DTYPES = {torch.float8_e4m3fn: "fp8_e4m3", torch.int8: "int8", torch.uint8: "fp4"}
_WAYS = ("per_tensor", "per_channel", "per_group")


@dataclass(frozen=True, slots=True)
class Quark:
    """The kinds of numbers of a checkpoint; the tensors of a matrix identify its kind."""

    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"Quark, {' and '.join('MXFP4' if kind == 'fp4' else kind for kind in self.kinds)}"

    @property
    def bits(self) -> int:
        return min(_KINDS[kind] for kind in self.kinds)

    @property
    def mixes(self) -> bool:
        return True

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        if not name.endswith(_WEIGHT) or name + _SCALE not in there or name not in there:
            return (name,)
        return name, name + _SCALE, *(name + end for end in (_ZERO,) if name + end in there)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        weight, scale = tensor(parts[0]), tensor(parts[1])
        if len(parts) == 3 and tensor(parts[2]).any():
            raise ConfigError(f"{parts[2]!r} is not zero; only symmetric weights can be read")
        if _DTYPES.get(weight.dtype) not in self.kinds:
            raise ConfigError(
                f"{parts[0]!r} is of {weight.dtype}, but config.json says {', '.join(self.kinds)}"
            )
        if weight.dtype == torch.uint8:
            return mxfp4(parts, weight, scale)
        scale = check_scales(parts[1], scale)
        if weight.dtype == torch.float8_e4m3fn:
            return fp8(parts, weight, scale, None)
        if weight.dim() != 2:
            raise ConfigError(f"{parts[0]!r} is {list(weight.shape)}, no matrix")
        rows, cols = weight.shape
        scale = scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale
        scale = scale.reshape(rows, -1) if scale.numel() % rows == 0 else scale
        if scale.dim() != 2 or len(scale) != rows or cols % scale.shape[1]:
            raise ConfigError(
                f"{parts[1]!r} is {list(scale.shape)}, but {parts[0]!r} {list(weight.shape)}"
            )
        group = 0 if scale.shape[1] == 1 else cols // scale.shape[1]
        return of_integers(weight.view(torch.uint8) ^ 128, scale, None, 8, group=group)


def quark(settings: Mapping[str, Any]) -> Quark:
    """The format of `quant_method` quark.

    Raises:
        ConfigError: numbers or a way of packing that are not known; names the field.
    """
    layers = settings.get("layer_quant_config") or {}
    schemes = {"global_quant_config": settings.get("global_quant_config")}
    schemes |= {f"layer_quant_config.{name}": scheme for name, scheme in layers.items()}
    kinds: list[str] = []
    for field, scheme in schemes.items():
        weight = scheme.get("weight") if isinstance(scheme, dict) else None
        weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
        if not isinstance(weight, dict):
            continue
        kind, way = weight.get("dtype"), weight.get("qscheme")
        fits = kind in _KINDS and way in _WAYS and weight.get("symmetric") is not False
        if kind == "fp4":
            fits = fits and weight.get("group_size") == 32 and weight.get("scale_format") == "e8m0"
        if not fits or (kind == "fp8_e4m3" and way == "per_group"):
            raise ConfigError(
                f"config.json: quantization_config.{field}.weight is {kind!r} {way!r} (symmetric "
                f"{weight.get('symmetric')}); symmetric fp8_e4m3 per tensor or channel, int8, and "
                "fp4 in groups of 32 with e8m0 scales (MXFP4) can be read"
            )
        kinds.append(str(kind))
    if not kinds:
        raise ConfigError(
            "config.json: quantization_config.global_quant_config says nothing of weights"
        )
    export = settings.get("export")
    stored = export.get("weight_format") if isinstance(export, dict) else None
    if stored not in (None, "real_quantized"):
        raise ConfigError(
            f"config.json: quantization_config.export.weight_format is {stored!r}; real_quantized "
            "can be read"
        )
    return Quark(tuple(dict.fromkeys(kinds)))
