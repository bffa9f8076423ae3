"""MXFP8 and MXFP4 matrices: a power-of-two scale (E8M0) per 32 inputs.

A scale is a byte: the exponent plus 127. Format: OCP Microscaling Formats (MX) 1.0.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.formats.stored import Tensors

_BIAS, _NAN, _GROUP = 127, 255, 32
_BYTES = (torch.uint8, torch.float8_e8m0fnu)
_WEIGHT, _IDLE = ".weight", (".input_scale", ".k_scale", ".v_scale")
_SCALES = ("_scale_inv", "_scale")


def powers_of(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Bytes of scales as numbers, of their shape; float32.

    Raises:
        ConfigError: other than bytes, or NaN; names the tensor.
    """
    if scales.dtype not in _BYTES:
        raise ConfigError(f"the scales {name!r} are {scales.dtype}, not bytes of exponents (E8M0)")
    exponents = scales.view(torch.uint8)
    if (exponents == _NAN).any():
        raise ConfigError(f"the scales {name!r} are not finite (NaN)")
    return torch.ldexp(torch.ones(scales.shape), exponents.int() - _BIAS)


def mxfp8(parts: Sequence[str], weight: torch.Tensor, scales: torch.Tensor) -> CodedWeight:
    """Numbers in e4m3 (N, K) with a power of two for 32 inputs (N, K / 32).

    Raises:
        ConfigError: another type or shape, or NaN; names the tensor.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ConfigError(
            f"{parts[0]!r} is {list(weight.shape)} of {weight.dtype}; expected a matrix of "
            "float8_e4m3fn"
        )
    rows, cols = weight.shape
    if cols % _GROUP or scales.shape != (rows, cols // _GROUP):
        raise ConfigError(
            f"{parts[1]!r} is {list(scales.shape)}, but {parts[0]!r} {list(weight.shape)}; MXFP8 "
            "has a scale for 32 inputs"
        )
    q = weight.view(torch.uint8).clone()
    if ((q & 127) == 127).any():
        raise ConfigError(f"the weights of {parts[0]!r} are not finite (NaN)")
    return CodedWeight(q, powers_of(parts[1], scales).bfloat16(), "fp8_e4m3", _GROUP)


def mxfp4(parts: Sequence[str], weight: torch.Tensor, scales: torch.Tensor) -> CodedWeight:
    """Bytes of two e2m1 numbers (N, K / 2), the lower half first, with scales (N, K / 32).

    Raises:
        ConfigError: another type or shape, or NaN; names the tensor.
    """
    rows, half = weight.shape if weight.dim() == 2 else (0, 0)
    if weight.dtype != torch.uint8 or half % 16 or scales.shape != (rows, half // 16) or not rows:
        raise ConfigError(
            f"{parts[0]!r} is {list(weight.shape)} of {weight.dtype} with scales {parts[1]!r} "
            f"{list(scales.shape)}; MXFP4 has 16 bytes for each scale"
        )
    return CodedWeight(weight.clone(), powers_of(parts[1], scales).bfloat16(), "fp4_e2m1", _GROUP)


class Mxfp8:
    """`NAME.weight` with `NAME.weight_scale_inv` or `NAME.weight_scale`, bytes of exponents."""

    name = "MXFP8 (e4m3 in groups of 32)"
    bits = 8
    mixes = False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        scale = next((name + end for end in _SCALES if name + end in there), None)
        if not name.endswith(_WEIGHT) or scale is None or name not in there:
            return (name,)
        return name, scale

    def idle(self, name: str, tensor: Tensors) -> bool:
        return name.endswith(_IDLE)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        return mxfp8(parts, tensor(parts[0]), tensor(parts[1]))


def of_mxfp8(settings: Mapping[str, Any]) -> Mxfp8:
    """The format of `quant_method` mxfp8, as SGLang writes it.

    Raises:
        ConfigError: groups that are not those of the format; names the field.
    """
    for field in ("weight_block_size", "group_size"):
        found = settings.get(field)
        if found not in (None, _GROUP, [1, _GROUP]):
            raise ConfigError(
                f"config.json: quantization_config.{field} is {found!r}; MXFP8 has groups of 32"
            )
    return Mxfp8()
