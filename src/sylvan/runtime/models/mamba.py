"""State-space models and hybrids of them: Mamba, FalconMamba, Mamba 2, Jamba, Bamba, Granite 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.recurrent import Mamba, Mamba2, Mamba2Shape, MambaShape
from sylvan.runtime.models.config import (
    ACTIVATIONS,
    ModelConfig,
    MoEConfig,
    architecture_of,
    common_fields,
    make_config,
    plain_fields,
)
from sylvan.runtime.models.decoder import FUSED, Attention, Decoder, Ropes, make_mlp
from sylvan.runtime.models.hybrid import HybridBlock, first_part, split_layers
from sylvan.runtime.models.moe import experts_are_numbered
from sylvan.runtime.models.rope import RopeParams

Raw = dict[str, Any]

_FIRST = frozenset({"MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM"})


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    architecture = architecture_of(raw)
    if architecture in _PURE:
        return make_config(_pure(raw))
    return make_config(common_fields(raw) | _FAMILIES[architecture](raw))


def _shape(raw: Raw) -> MambaShape | Mamba2Shape:
    return _first_shape(raw) if architecture_of(raw) in _FIRST else _second_shape(raw)


def _first_shape(raw: Raw) -> MambaShape:
    jamba = architecture_of(raw) == "JambaForCausalLM"
    pre, hidden = ("mamba_" if jamba else ""), raw.get("hidden_size") or 1
    inner = raw.get(f"{pre}expand", 2) * hidden if jamba else raw.get("intermediate_size")
    rank = raw.get("mamba_dt_rank" if jamba else "time_step_rank", "auto")
    free = architecture_of(raw) == "FalconMambaForCausalLM"
    return MambaShape(
        dim=hidden,
        inner=inner or 2 * hidden,
        states=raw.get("mamba_d_state" if jamba else "state_size", 16),
        rank=math.ceil(hidden / 16) if rank == "auto" else rank,
        taps=raw.get("mamba_d_conv" if jamba else "conv_kernel", 4),
        bias=bool(raw.get("mamba_proj_bias" if jamba else "use_bias", False)),
        conv_bias=bool(raw.get("mamba_conv_bias" if jamba else "use_conv_bias", True)),
        norms="weighted" if jamba else "free" if free else "",
        eps=raw.get("mixer_rms_eps" if free else "rms_norm_eps", 1e-6),
    )


def _second_shape(raw: Raw) -> Mamba2Shape:
    pure = architecture_of(raw) == "Mamba2ForCausalLM"
    names = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    if not pure:
        names = tuple(f"mamba_{n}" for n in ("n_heads", "d_head", "d_state", "n_groups", "d_conv"))
    defaults = (128, 64, 128, 8, 4) if pure else (128, 64, 256, 1, 4)
    found = [raw.get(name) or default for name, default in zip(names, defaults, strict=True)]
    heads, head_dim, states, groups, taps = found
    if head_dim == "auto":
        head_dim = raw.get("mamba_expand", 2) * (raw.get("hidden_size") or 1) // heads
    eps = raw.get("layer_norm_epsilon" if pure else "rms_norm_eps", 1e-5)
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    return Mamba2Shape(
        dim=raw.get("hidden_size") or 1,
        heads=heads,
        head_dim=head_dim,
        states=states,
        groups=groups,
        taps=taps,
        eps=eps,
        bias=bool(raw.get("use_bias" if pure else "mamba_proj_bias", False)),
        conv_bias=bool(raw.get("use_conv_bias" if pure else "mamba_conv_bias", True)),
        norm_groups=groups,
        dt_limit=(float(low), _number(high)),
    )


def _number(value: Any) -> float:
    """A number in the spelling of JSON or transformers."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _pure(raw: Raw) -> Raw:
    layers = raw.get("num_hidden_layers")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {act!r} of state-space layers is not supported")
    if not isinstance(layers, int):
        raise ConfigError("config.json: num_hidden_layers is missing")
    return (
        plain_fields(raw)
        | split_layers(["mamba"] * layers, _shape(raw).parts)
        | {
            "architecture": architecture_of(raw),
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": 1,
            "num_hidden_layers": layers,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
            "max_position_embeddings": raw.get("max_position_embeddings") or _ENDLESS,
            "rope": RopeParams(),
            "hidden_act": ACTIVATIONS[act],
            "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": bool(
                raw.get("tie_word_embeddings", _TIED[architecture_of(raw)])
            ),
        }
    )


def _jamba(raw: Raw) -> Raw:
    layers = range(raw.get("num_hidden_layers") or 0)
    period, offset = raw.get("attn_layer_period", 8), raw.get("attn_layer_offset", 4)
    kinds = ["attention" if i % period == offset else "mamba" for i in layers]
    found = split_layers(kinds, _shape(raw).parts) | {"nope_layers": tuple(layers)}
    if raw.get("num_experts", 16) < 2:
        return found
    every, first = raw.get("expert_layer_period", 2), raw.get("expert_layer_offset", 1)
    moe = MoEConfig(
        num_experts=raw.get("num_experts", 16),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=raw.get("intermediate_size") or 0,
        layers=tuple(i for i in layers if i % every == first),
    )
    return found | {"moe": moe}


def _bamba(raw: Raw) -> Raw:
    layers = range(raw.get("num_hidden_layers") or 0)
    attending = raw.get("attn_layer_indices") or ()
    named = raw.get("layers_block_type") or raw.get("layer_types")
    kinds = named or ["attention" if i in attending else "mamba" for i in layers]
    bias = bool(raw.get("attention_bias", False))
    found = split_layers(kinds, _shape(raw).parts)
    return found | {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}


def _granite(raw: Raw) -> Raw:
    layers = range(raw.get("num_hidden_layers") or 0)
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba" for _ in layers]
    shared, bias = raw.get("shared_intermediate_size", 1024), bool(raw.get("attention_bias", False))
    rope = raw.get("position_embedding_type") == "rope"
    found = split_layers(kinds, _shape(raw).parts) | {
        "qkv_bias": bias,
        "o_bias": bias,
        "intermediate_size": shared,
        "nope_layers": () if rope else tuple(layers),
        "embed_scale": raw.get("embedding_multiplier", 1.0),
        "logit_scale": 1.0 / (raw.get("logits_scaling") or 1.0),
        "residual_scale": raw.get("residual_multiplier", 1.0),
        "attention_scale": raw.get("attention_multiplier", 1.0),
    }
    if not raw.get("num_local_experts"):
        return found
    moe = MoEConfig(
        num_experts=raw["num_local_experts"],
        top_k=raw.get("num_experts_per_tok", 8),
        inner=raw.get("intermediate_size") or 0,
        scores="softmax_chosen",
        layers=tuple(layers),
        shared=shared,
    )
    return found | {"moe": moe}


_ENDLESS = 1 << 20
"""Default context length of models without positions."""
_TIED: Mapping[str, bool] = MappingProxyType(
    {"MambaForCausalLM": True, "FalconMambaForCausalLM": True, "Mamba2ForCausalLM": False}
)
_PURE = frozenset(_TIED)
_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "JambaForCausalLM": _jamba,
        "BambaForCausalLM": _bamba,
        "GraniteMoeHybridForCausalLM": _granite,
    }
)


class StateSpace(Decoder):
    """Attention layers as configured; the other layers are state spaces."""

    mixer_name: ClassVar[str] = "mamba"

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        mlp = None if config.architecture in _PURE else make_mlp(config, build, layer)
        if layer in (config.attention_layers or ()):
            attention = Attention(config, build, layer, ropes)
            return HybridBlock(config, build, "self_attn", attention, mlp)
        shape, part = _shape(config.raw), first_part(config, layer, 2)
        first = isinstance(shape, MambaShape)
        mixer = Mamba(build, shape, part) if first else Mamba2(build, shape, part)
        return HybridBlock(config, build, self.mixer_name, mixer, mlp)


class Pure(StateSpace):
    """State spaces only."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("embeddings",),
        "input_layernorm": ("norm",),
        "gate_norm": ("norm",),
        "norm": ("norm_f",),
    }
    mixer_name: ClassVar[str] = "mixer"


class Jamba(StateSpace):
    """Names of Jamba and Bamba."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "post_attention_layernorm": ("pre_ff_layernorm",),
        "mlp": ("feed_forward",),
        "gate": ("router",),
        "gate_norm": ("norm",),
        "norm": ("final_layernorm",),
    }


class Granite(StateSpace):
    """Experts are stored as stacks, shared experts as a separate mlp."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "gate_norm": ("norm",),
    }
    stacked: ClassVar[bool] = True

    def source_name(self, source: str) -> str:
        """The names of Granite's mixtures."""
        return granite_name(source)


class NumberedGranite(StateSpace):
    """GGUF: experts are stored one by one, with plain names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "gate_norm": ("norm",)}


def granite_name(source: str) -> str:
    """Granite's name of a feed-forward tensor."""
    for ours, theirs in _GRANITE:
        source = source.replace(ours, theirs)
    return source


_GRANITE = (
    (".mlp.gate.", ".block_sparse_moe.router.layer."),
    (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".mlp.shared_experts.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.shared_experts.down_proj", ".shared_mlp.output_linear"),
    (".mlp.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.down_proj", ".shared_mlp.output_linear"),
)
_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "JambaForCausalLM": Jamba,
        "BambaForCausalLM": Jamba,
        "GraniteMoeHybridForCausalLM": Granite,
    }
)


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """Select the class that matches the tensor names of the checkpoint."""
    if experts_are_numbered(config.raw):
        return NumberedGranite(config, build)
    return _MODELS.get(config.architecture, Pure)(config, build)
