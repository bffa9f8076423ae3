"""Selects the matrices of a model to quantise, and quantises them.

The linear layers between embedding and head get the bits of the format; the head gets 8 bits in
every format, and so does an embedding that is tied to it. Everything else stays as it is: routers,
norms, separate embeddings, and matrices that are not multiplied by `ops.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from sylvan.kernels.matmul.codes import Code
from sylvan.kernels.matmul.rounding import (
    MX_GROUP,
    NVFP4_GROUP,
    quantise_fp8_blocks,
    quantise_mxfp4,
    quantise_mxfp8,
    quantise_nvfp4,
)
from sylvan.kernels.matmul.weights import (
    GROUP_SIZES,
    CodedWeight,
    Form,
    QuantisedWeight,
    quantise_fp8,
    quantise_int4,
    quantise_int4_codes,
    quantise_int8,
)
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.moe import Experts, MoE, Router
from sylvan.runtime.models.config import ModelConfig

_FEWEST_OUTPUTS = 16
_PREFERRED_GROUPS = (64, 32)


Rounding = Literal["fp8-block", "mxfp8", "mxfp4", "nvfp4"]
"""Formats with scales that are powers of two, per block, or quantised themselves."""


@dataclass(frozen=True, slots=True)
class Format:
    """Bits of the linear layers and of the head; None: they stay as stored.

    `code`: layers are stored as codes, and activations keep their type; None: both are integers.
    `scheme`: computes codes and scales, for formats that need whole matrices of the checkpoint.
    """

    name: str
    bits: int | None
    head_bits: int | None = 8
    code: Code | None = None
    scheme: Rounding | None = None


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "w8a8": Format("w8a8", 8),
        "int8": Format("w8a8", 8),
        "w4a8": Format("w4a8", 4),
        "int4": Format("w4a8", 4),
        "w4a16": Format("w4a16", 4, None, "int4"),
        "fp8": Format("fp8", 8, None, "fp8_e4m3"),
        "fp8-block": Format("fp8-block", 8, None, "fp8_e4m3", "fp8-block"),
        "mxfp8": Format("mxfp8", 8, None, "fp8_e4m3", "mxfp8"),
        "mxfp4": Format("mxfp4", 4, None, "fp4_e2m1", "mxfp4"),
        "nvfp4": Format("nvfp4", 4, None, "fp4_e2m1", "nvfp4"),
        "nvfp4_online": Format("nvfp4", 4, None, "fp4_e2m1", "nvfp4"),
    }
)
"""Formats by user-visible name."""


def format_of(name: str) -> Format:
    """Return the format `name`.

    Raises:
        ConfigError: there is no such format.
    """
    if name not in FORMATS:
        raise ConfigError(f"quantization must be one of {', '.join(FORMATS)}, not {name!r}")
    return FORMATS[name]


def check_model(config: ModelConfig) -> None:
    """Reject a model that no format covers.

    Raises:
        ConfigError: names what cannot be quantised.
    """
    if config.path != "native":
        raise ConfigError(
            "quantization: models that run through transformers cannot be quantised; leave it at "
            "none"
        )


def matrices(model: nn.Module, wanted: Format) -> Iterator[tuple[str, int]]:
    """Name and bits of each parameter to quantise; tied ones once, under the first name."""
    head = getattr(model, "lm_head", None)
    head_weight = getattr(head, "weight", None)
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        if wanted.bits and parameter.dim() == 3 and isinstance(model.get_submodule(path), Experts):
            yield name, wanted.bits
        if attribute != "weight" or parameter.dim() != 2:
            continue
        if parameter is head_weight:
            if wanted.head_bits is not None:
                yield name, wanted.head_bits
        elif wanted.bits and path.startswith("layers.") and _is_multiplied(model, path, parameter):
            yield name, wanted.bits


def weight_bytes(model: nn.Module, wanted: Format | None, dtype_bytes: int) -> int:
    """Bytes of all parameters once loaded, including scales."""
    bits = dict(matrices(model, wanted)) if wanted else {}
    total = 0
    for name, parameter in model.named_parameters():
        if name in bits:
            inputs = parameter.shape[-1] if bits[name] > 4 else _PREFERRED_GROUPS[0]
            scales = parameter.numel() // inputs
            total += parameter.numel() * (4 if bits[name] <= 4 else 8) // 8 + 4 * scales
        else:
            total += parameter.numel() * dtype_bytes
    return total


_BY_SCHEME: Mapping[Rounding, tuple[int, Callable[[torch.Tensor], CodedWeight]]] = MappingProxyType(
    {
        "fp8-block": (1, quantise_fp8_blocks),
        "mxfp8": (MX_GROUP, quantise_mxfp8),
        "mxfp4": (MX_GROUP, quantise_mxfp4),
        "nvfp4": (NVFP4_GROUP, quantise_nvfp4),
    }
)
"""Required divisor of the inputs, and the quantising function."""


def convert(
    name: str, weight: torch.Tensor, bits: int, wanted: Format | None = None
) -> QuantisedWeight:
    """Quantise a matrix or stack: 8 bits per row, 4 bits in groups of inputs, or by a scheme.

    A group has 64 inputs (128 for codes) if they divide evenly, else 32.

    Raises:
        ConfigError: its inputs do not divide into groups; names it.
    """
    code = wanted.code if wanted else None
    if wanted is not None and wanted.scheme is not None:
        return _by_scheme(name, weight, wanted.scheme)
    if bits == 8:
        return quantise_int8(weight) if code is None else quantise_fp8(weight)
    group = group_of(name, weight.shape[-1], code)
    return (quantise_int4 if code is None else quantise_int4_codes)(weight, group)


def form_of(name: str, inputs: int, bits: int, wanted: Format) -> Form | None:
    """The form that `convert` gives a matrix; None if it is one of codes.

    Raises:
        ConfigError: see `convert`.
    """
    if wanted.code is not None:
        return None
    return Form("int8") if bits == 8 else Form("int4", group_of(name, inputs))


def _by_scheme(name: str, weight: torch.Tensor, scheme: Rounding) -> CodedWeight:
    group, rounded = _BY_SCHEME[scheme]
    if weight.shape[-1] % group:
        raise ConfigError(
            f"quantization: {name!r} has {weight.shape[-1]} inputs, which do not divide into "
            f"groups of {group} as {scheme} has them; choose fp8"
        )
    if weight.dim() == 2:
        return rounded(weight)
    parts = [rounded(matrix) for matrix in weight]
    return parts[0].like([torch.stack(x) for x in zip(*(p.tensors for p in parts), strict=True)])


def group_of(name: str, inputs: int, code: Code | None = None) -> int:
    """Group size of a 4-bit matrix.

    Raises:
        ConfigError: see `convert`.
    """
    for group in _PREFERRED_GROUPS if code is None else (128, *_PREFERRED_GROUPS):
        if inputs % group == 0:
            return group
    raise ConfigError(
        f"quantization: {name!r} has {inputs} inputs, which do not divide into groups of "
        f"{GROUP_SIZES[0]}; 4 bits cannot be used, choose w8a8"
    )


def is_multiplied(model: nn.Module, name: str) -> bool:
    """Whether quantised matrix kernels multiply by the parameter `name`."""
    path, _, _ = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(module, Experts):
        return True
    weight, head = module.weight, getattr(model, "lm_head", None)
    return weight is getattr(head, "weight", None) or _is_multiplied(model, path, weight)


def _is_multiplied(model: nn.Module, path: str, parameter: torch.Tensor) -> bool:
    module = model.get_submodule(path)
    above = model.get_submodule(path.rpartition(".")[0])
    if not isinstance(module, Linear) or isinstance(module, Router):
        return False
    if isinstance(above, LatentAttention) and module is above.kv_b_proj:
        return False
    return not isinstance(above, MoE) and parameter.shape[0] >= _FEWEST_OUTPUTS
