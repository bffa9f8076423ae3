"""Reads calibrated scales of keys and values from checkpoints, for FP8 (e4m3) KV caches.

Names: compressed-tensors `self_attn.k_scale` and `v_scale` (formerly `k_proj.output_scale`), one
number or one per head (strategy attn_head); ModelOpt `k_proj.k_scale`; Quark
`k_proj.output_scale`; AutoFP8 `self_attn.kv_scale` for both. In all: value = code * scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sylvan.kernels.api import AttentionLayer, KVScales
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.mesh import Share
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.stored import WeightFiles

ENDS = (
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".prob_output_scale"),
    *(".k_zero_point", ".v_zero_point", ".q_zero_point"),
    *(".k_proj.output_scale", ".v_proj.output_scale", ".q_proj.output_scale"),
)
"""Name suffixes of tensors with scales of queries, keys and values, which are not weights."""

_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*?(?:(kv?|v)_scale|([kv])_proj\.output_scale)$"
)
_OTHER_TOWERS = ("vision", "visual", "audio", "encoder")


def brings_kv_scales(raw: Mapping[str, Any]) -> bool:
    """Whether KV scales in a checkpoint are meant for e4m3.

    `raw`: its config.json. If that says nothing about them, they are.
    """
    found = raw.get("quantization_config") or raw.get("compression_config") or {}
    if not isinstance(found, dict):
        return False
    scheme, algorithm = found.get("kv_cache_scheme"), found.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        return (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return algorithm in (None, "FP8")


def read_kv_scales(
    files: WeightFiles, config: ModelConfig, heads: Share, kind: torch.dtype
) -> Mapping[int, KVScales]:
    """Scales of each attention layer, by its index; empty: the checkpoint has none.

    Args:
        files: The checkpoint.
        config: Config of the model.
        heads: Key heads of this rank.
        kind: Type of the cache: float8_e4m3fn, or e4m3fnuz, whose maximum is 240 instead of 448.

    Raises:
        ConfigError: Scales are not positive, of another shape, or missing for some layers; names
            the tensor.
    """
    found: dict[int, dict[str, str]] = {}
    for name in files.tensors if brings_kv_scales(config.raw) else ():
        if (match := _NAME.search(name)) and not any(word in name for word in _OTHER_TOWERS):
            layer, side = int(match[1]), match[2] or match[3]
            if layer < config.num_hidden_layers:
                found.setdefault(layer, {}).update(dict.fromkeys(side, name))
    if not found:
        return {}
    layers = config.attention_layers or range(config.num_hidden_layers)
    if lacking := sorted(set(layers) - found.keys()):
        raise ConfigError(
            f"the checkpoint has scales of keys and values for layer {min(found)}, but none for "
            f"layer {lacking[0]}; leave cache.dtype at model"
        )
    scales: dict[int, KVScales] = {}
    for layer in layers:
        names = found[layer]
        if missing := {"k", "v"} - names.keys():
            have = next(iter(names.values()))
            raise ConfigError(
                f"the checkpoint has {have!r}, but no {missing.pop()}_scale of the same layer; "
                "leave cache.dtype at model"
            )
        sides = [_heads(names[side], files.tensor(names[side]), heads, kind) for side in "kv"]
        scales[config.kv_index(layer)] = KVScales(*sides)
    return scales


def scaled_layers(model_dir: Path, config: ModelConfig) -> int:
    """Number of layers with scales.

    Raises:
        ConfigError: see `read_kv_scales`.
    """
    if config.path != "native" or config.latent or not config.kv_layers:
        return 0
    heads = Share(config.num_key_value_heads, 0, config.num_key_value_heads)
    return len(read_kv_scales(open_weights(model_dir), config, heads, torch.float8_e4m3fn))


def _heads(name: str, scale: torch.Tensor, heads: Share, kind: torch.dtype) -> torch.Tensor:
    """The scale of each key head of this rank. Shape: (K,), float32."""
    if not scale.is_floating_point() or scale.numel() not in (1, heads.whole):
        raise ConfigError(
            f"{name!r} is {list(scale.shape)} of {scale.dtype}; expected one scale, or one for "
            f"each of the {heads.whole} key heads"
        )
    whole = scale.float().flatten().expand(heads.whole)
    if not (whole.isfinite() & (whole > 0)).all():
        raise ConfigError(f"{name!r} has scales that are not positive, finite numbers")
    reach = 2.0 if torch.finfo(kind).max < 448 else 1.0  # the files' scales are for 448
    return (whole[heads.start : heads.start + heads.size] * reach).contiguous()


def use_kv_scales(model: nn.Module, scales: Mapping[int, KVScales], device: torch.device) -> None:
    """Set the scales of a model's attention layers, by layer index."""
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, AttentionLayer) and value.causal and value.index in scales:
                mine = scales[value.index]
                there = KVScales(mine.keys.to(device), mine.values.to(device))
                setattr(module, name, replace(value, kv_scales=there))
