"""Quantised weights in safetensors files, in the layout of compressed-tensors.

The layout is the one that llm-compressor writes:
`NAME.weight` as int8 with `NAME.weight_scale` (N, 1) ("int-quantized"); or `NAME.weight_packed`,
int32 words of eight 4-bit (or four 8-bit) levels, lowest first, each raised to be unsigned, with
`NAME.weight_scale` (N, groups) and `NAME.weight_shape` ("pack-quantized").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sylvan.kernels.matmul.weights import GROUP_SIZES, Int4Weight, Int8Weight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.quantise import Format, check_model, format_of

Quantised = Int8Weight | Int4Weight
_LAYOUTS = ("int-quantized", "pack-quantized")
_SCALE, _PACKED, _SHAPE = "_scale", "_packed", "_shape"


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model is in memory, and what is converted for that while it is read."""

    loaded: Format | None = None
    converted: Format | None = None


def choose(config: ModelConfig, asked: str | None, *, on_cpu: bool = True) -> Formats:
    """The checkpoint's own format, or the one asked for.

    Raises:
        ConfigError: the two differ, or the model cannot be quantised.
    """
    own = stored_format(config.raw)
    wanted = None if asked is None else format_of(asked)
    if own is None and wanted is None:
        return Formats()
    check_model(config, on_cpu=on_cpu)
    if own is None:
        return Formats(wanted, wanted)
    if wanted is not None and wanted.name != own.name:
        raise ConfigError(
            f"quantization: the checkpoint is {own.name} already, not {asked}; leave it at none"
        )
    own = replace(own, head_bits=8) if wanted else own
    return Formats(own, replace(own, bits=None))


def stored_format(raw: Mapping[str, Any]) -> Format | None:
    """How a checkpoint is quantised, by its config.json; None: it is not.

    Raises:
        ConfigError: quantised in a way that there are no kernels for; says which.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ConfigError("config.json: quantization_config must be an object")
    method = found.get("quant_method")
    if method == "mxfp4":  # read as plain numbers: see `mxfp4`
        return None
    if method != "compressed-tensors":
        raise ConfigError(
            f"the checkpoint is quantised by {method!r}, which there are no kernels for; those of "
            f"compressed-tensors with int8 or int4 weights are served"
        )
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError("config.json: quantization_config has no config_groups")
    bits = {_bits(group, found.get("format")) for group in groups.values()}
    kept = raw.get("sylvan")
    head = kept.get("head_bits") if isinstance(kept, dict) else None
    name = "w8a8" if min(bits) == 8 else "w4a8"
    return Format(name, min(bits), head if head == 8 else None)


def _bits(group: Any, layout: object) -> int:
    weights = (group.get("weights") if isinstance(group, dict) else None) or {}
    layout = (group.get("format") if isinstance(group, dict) else None) or layout
    bits, kind, how = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    known = (8, "channel"), (4, "group"), (4, "channel")
    fits = (bits, how) in known and kind == "int" and weights.get("symmetric", True)
    size = weights.get("group_size")
    if how == "group" and size not in GROUP_SIZES:
        fits = False
    if bits is None or not fits or layout not in _LAYOUTS:
        raise ConfigError(
            f"the checkpoint's weights are {kind!r} of {bits} bits by {how!r} (group_size {size}, "
            f"symmetric {weights.get('symmetric', True)}) in {layout!r}; there are kernels for "
            f"symmetric int8 by channel and int4 in groups of {', '.join(map(str, GROUP_SIZES))}"
        )
    return int(bits)


def quantization_config(wanted: Format, group: int | None, ignore: Sequence[str]) -> dict[str, Any]:
    """What config.json says of a checkpoint that `stored` tensors were written to."""
    weights: dict[str, Any] = {"num_bits": wanted.bits, "type": "int", "symmetric": True}
    weights |= {"dynamic": False, "strategy": "channel" if wanted.bits == 8 else "group"}
    weights |= {"group_size": group}
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    layout = _LAYOUTS[wanted.bits == 4]
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"output_activations": None, "format": layout}},
        "ignore": list(ignore),
    }


def stored(name: str, weight: Quantised) -> dict[str, torch.Tensor]:
    """The tensors that a matrix `name` (ending in `.weight`) is written as."""
    if isinstance(weight, Int8Weight):
        return {name: weight.q, name + _SCALE: weight.scale[:, None]}
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    words = weight.q.view(torch.int32)
    return {name + _PACKED: words, name + _SCALE: weight.scale, name + _SHAPE: shape}


def parts_of(name: str, there: Collection[str]) -> tuple[str, ...]:
    """Names of the tensors that hold the parameter `name`; itself alone if it is a plain one."""
    if name + _PACKED in there:
        return name + _PACKED, name + _SCALE, name + _SHAPE
    if name + _SCALE in there and name in there:
        return name, name + _SCALE
    return (name,)


def read(name: str, parts: Sequence[str], tensor: Callable[[str], torch.Tensor]) -> Quantised:
    """The matrix `name` out of its `parts`; new tensors.

    Raises:
        ConfigError: sizes that contradict each other, or scales that are not finite; names it.
    """
    scale = tensor(parts[1]).float()
    if not scale.isfinite().all():
        raise ConfigError(f"the scales {parts[1]!r} are not finite (NaN or infinity)")
    if len(parts) == 2:
        return _by_row(name, tensor(parts[0]).clone(), scale)
    rows, cols = (int(n) for n in tensor(parts[2]).flatten().tolist())
    words = tensor(parts[0])
    if words.dtype != torch.int32 or len(words) != rows or rows < 1 or cols < 1:
        raise ConfigError(f"{parts[0]!r} is {list(words.shape)} of {words.dtype}, for {rows} rows")
    per_word = -(-cols // words.shape[1])
    levels = words.contiguous().view(torch.uint8)
    if per_word == 4 and levels.shape[1] == cols:
        return _by_row(name, (levels ^ 128).view(torch.int8), scale)
    if per_word != 8 or levels.shape[1] * 2 != cols or scale.shape[0] != rows:
        raise ConfigError(f"{parts[0]!r} is {list(words.shape)}, which is not {rows} x {cols}")
    return _in_groups(name, levels.clone(), scale, cols)


def join(name: str, parts: Sequence[Quantised]) -> Quantised:
    """Matrices of equal inputs below each other.

    Raises:
        ConfigError: they are quantised in different ways.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Int8Weight):
        eights = [part for part in parts if isinstance(part, Int8Weight)]
        if len(eights) == len(parts):
            q, scale = (torch.cat(x) for x in zip(*((w.q, w.scale) for w in eights), strict=True))
            return Int8Weight(q, scale)
    else:
        same = [p for p in parts if isinstance(p, Int4Weight) and p.group == first.group]
        if len(same) == len(parts):
            q, scale = (torch.cat(x) for x in zip(*((w.q, w.scale) for w in same), strict=True))
            return Int4Weight(q, scale, first.group)
    raise ConfigError(f"the parts of {name!r} are quantised in different ways")


def stack(weight: Quantised, count: int) -> Quantised:
    """As many matrices of equal rows, which lie below each other, as a stack."""
    q, scale = (part.unflatten(0, (count, -1)) for part in (weight.q, weight.scale))
    return (
        Int8Weight(q, scale)
        if isinstance(weight, Int8Weight)
        else Int4Weight(q, scale, weight.group)
    )


def _by_row(name: str, q: torch.Tensor, scale: torch.Tensor) -> Int8Weight:
    if q.dtype != torch.int8 or q.dim() != 2 or scale.numel() != len(q):
        raise ConfigError(
            f"{name!r} is {list(q.shape)} of {q.dtype} with {scale.numel()} scales; expected int8 "
            f"with one scale a row"
        )
    return Int8Weight(q, scale.flatten().contiguous())


def _in_groups(name: str, q: torch.Tensor, scale: torch.Tensor, cols: int) -> Int4Weight:
    groups = scale.shape[1] if scale.dim() == 2 else 1
    group = cols // groups
    if groups == 1:  # one scale a row: the same as in the largest groups that divide it
        group = next((g for g in reversed(GROUP_SIZES) if cols % g == 0), 0)
        scale = scale.reshape(-1, 1).expand(-1, cols // group if group else 1)
    if group not in GROUP_SIZES or scale.shape[1] * group != cols:
        raise ConfigError(f"{name!r} has {groups} scales a row of {cols} inputs; no kernel for it")
    return Int4Weight(q, scale.contiguous(), group)
