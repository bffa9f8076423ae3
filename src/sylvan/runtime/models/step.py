"""Step 3.5: Llama with a gate per head, more heads in window layers, and many experts.

Layers with a window have another number of query heads and other positions. The last layers clamp
the activations of experts. Names as in published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
from torch import nn

from sylvan.kernels.api import Clamping, TracedTensor, Unsupported, X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.mlp import ClampedMLP
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    common_fields,
    make_config,
    sliding_windows,
)
from sylvan.runtime.models.decoder import FUSED, Attention, Decoder, PreNorm, Ropes
from sylvan.runtime.models.rope import RopeParams, parse_rope

Raw = dict[str, Any]
T = TypeVar("T")

_STACKS = re.compile(r"(.*)\.moe\.(gate|up|down)_proj\.weight")
_FULL, _NEAR = "full_attention", "sliding_attention"


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `Step3p5ForCausalLM`.

    Raises:
        ConfigError: a list has no entry for each layer, or a switch is unknown.
    """
    layers = raw.get("num_hidden_layers") or 0
    kinds = _each(raw, "layer_types", layers) or [_FULL] * layers
    if not raw.get("use_head_wise_attn_gate", True):
        raise ConfigError("config.json: Step 3.5 without gated heads is not supported")
    sizes = {
        "num_key_value_heads": raw.get("num_attention_groups") or raw.get("num_key_value_heads"),
        "max_position_embeddings": raw.get("max_position_embeddings") or raw.get("max_seq_len"),
        "layer_types": kinds,
        "rope_theta": None,
        "rope_scaling": None,
    }
    moe = MoEConfig(
        num_experts=raw.get("moe_num_experts") or raw.get("n_routed_experts") or 288,
        top_k=raw.get("moe_top_k") or raw.get("num_experts_per_tok") or 8,
        inner=raw.get("moe_intermediate_size", 1280),
        scores="sigmoid",
        normalise=True,
        scale=raw.get("moe_router_scaling_factor", 1.0),
        correction=True,
        layers=_sparse(raw, layers),
        shared=raw.get("share_expert_dim", raw.get("share_expert_dims", 1280)),
        clamp="outputs",
    )
    fields = {
        "moe": moe,
        "norm_offset": 1.0,
        "qk_norm": "head",
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "layer_windows": sliding_windows(raw | sizes, default_on=True),
        "rope": _rope(raw, kinds, _FULL),
        "local_rope": _rope(raw, kinds, _NEAR),
    }
    return make_config(common_fields(raw | sizes) | fields)


def _each(raw: Raw, name: str, layers: int) -> list[Any] | None:
    """Read a list with an entry per layer; drops entries of multi-token prediction layers."""
    found = raw.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) < layers:
        raise ConfigError(f"config.json: {name} must have an entry for each of {layers} layers")
    return found[:layers]


def _sparse(raw: Raw, layers: int) -> tuple[int, ...]:
    """Layers with experts: numbers in a string or a list; default: all from the fourth on."""
    given = raw.get("moe_layers_enum")
    if given is None:
        return tuple(range(3, layers))
    numbers = given.split(",") if isinstance(given, str) else given
    try:
        found = {int(number) for number in numbers if str(number).strip()}
    except (TypeError, ValueError):
        raise ConfigError(f"config.json: moe_layers_enum must list layers: {given!r:.80}") from None
    return tuple(layer for layer in range(layers) if layer in found)


def _rope(raw: Raw, kinds: list[Any], kind: str) -> RopeParams | None:
    """Rotary positions of one kind of layers, which must be equal; None without such layers."""
    if kind not in kinds:
        return RopeParams() if kind == _FULL else None
    at, found = kinds.index(kind), {"rope_type": "default"}
    scaling = raw.get("rope_scaling")
    if scaling and kind in (raw.get("yarn_only_types") or [_FULL]):
        found |= scaling
    found |= {"rope_theta": _of_layer(raw.get("rope_theta", 10_000.0), at)}
    found |= {"partial_rotary_factor": _of_layer(raw.get("partial_rotary_factors") or 1.0, at)}
    return parse_rope({"rope_parameters": found}, raw.get("max_position_embeddings") or 1)


def _of_layer(value: T | list[T], layer: int) -> T | None:
    if not isinstance(value, list):
        return value
    return value[layer] if layer < len(value) else None


def _limit(raw: Raw, name: str, layer: int) -> float | None:
    """The limit of a layer; 0: none."""
    found = _of_layer(raw.get(name) or [], layer)
    return float(found) if isinstance(found, int | float) and found else None


def _of_heads(config: ModelConfig, layer: int) -> ModelConfig:
    """The config of a layer."""
    raw = config.raw
    other = raw.get("attention_other_setting") or {}
    heads = raw.get("num_sliding_attention_heads") or other.get("num_attention_heads")
    if config.layer_windows[layer] is None or not heads:
        return config
    return msgspec.structs.replace(config, num_attention_heads=heads)


class HeadGateAttention(Attention):
    """Attention with a gate per head, computed from the row."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        self.g_proj = ColumnParallel(build, config.hidden_size, Split(heads.queries))

    def of_rows(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            raise Unsupported("attention with a gate per head")
        assert isinstance(x_TD, torch.Tensor)
        out = self.attn(self.qkv_proj(x_TD), batch).unflatten(-1, (self.attn.layer.num_heads, -1))
        return self.o_proj((out * self.g_proj(x_TD).sigmoid()[..., None]).flatten(1))


class StepBlock(PreNorm):
    """Llama's block, with heads and limits that differ between layers."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        assert config.moe is not None
        limits = (_limit(config.raw, f"swiglu_limits{end}", layer) for end in ("", "_shared"))
        routed, shared = limits
        moe = msgspec.structs.replace(config.moe, limit=routed, shared_limit=shared)
        config = msgspec.structs.replace(config, moe=moe)
        super().__init__(config, build, layer, ropes)
        self.self_attn = HeadGateAttention(_of_heads(config, layer), build, layer, ropes)
        if layer not in moe.layers and shared is not None:
            sizes = config.hidden_size, config.intermediate_size
            self.mlp = ClampedMLP(build, sizes, config.hidden_act, Clamping(shared, "outputs"))


class StepDecoder(Decoder):
    """Maps tensor names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "shared_experts": ("share_expert",)}

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return StepBlock(config, build, layer, ropes)

    def parts_of(self, name: str) -> tuple[str, ...]:
        """The matrices of experts in a stored stack."""
        found, moe = _STACKS.fullmatch(name), self.config.moe
        if found is None or moe is None:
            return ()
        stem, kind = found.groups()
        numbers = range(moe.num_experts)
        return tuple(f"{stem}.mlp.experts.{expert}.{kind}_proj.weight" for expert in numbers)

    def source_name(self, source: str) -> str:
        """Map names: experts are stored beside the mlp, the selection bias as `router_bias`."""
        source = source.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
        source = source.replace(".mlp.gate.", ".moe.gate.")
        return source.replace(".mlp.share_expert.", ".share_expert.")


MODEL = StepDecoder
