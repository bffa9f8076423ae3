"""Hybrids of attention and recurrent layers, and blocks that these share.

LFM2 (short convolutions), Qwen3-Next and Qwen3.5 (gated delta nets and gated attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.recurrent import Columns, GateRule, recurrent
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.recurrent import (
    DeltaShape,
    GatedDelta,
    HalfSplitDelta,
    ShortConv,
    SplitDelta,
)
from sylvan.runtime.models.config import (
    ModelConfig,
    MoEConfig,
    StatePart,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import (
    FUSED,
    Attention,
    Decoder,
    Ropes,
    make_mlp,
    make_norm,
    scaled,
)
from sylvan.runtime.models.moe import sparse_layers
from sylvan.runtime.models.text_parts import text_part

Raw = dict[str, Any]
Parts = tuple[tuple[tuple[int, ...], bool], ...]

ATTENDING = frozenset({"full_attention", "attention"})


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of any model served here."""
    raw = text_part(raw)
    fields = common_fields(raw)
    return make_config(fields | _FAMILIES[fields["architecture"]](raw))


def split_layers(kinds: list[str], parts: Parts) -> Raw:
    """Fields for the attention layers, and the states of the other layers."""
    attending = tuple(i for i, kind in enumerate(kinds) if kind in ATTENDING)
    states = tuple(
        StatePart(shape, exact) for kind in kinds if kind not in ATTENDING for shape, exact in parts
    )
    return {"attention_layers": attending, "states": states}


def first_part(config: ModelConfig, layer: int, parts: int) -> int:
    """Number of the first of the `parts` states of a recurrent layer."""
    attending = config.attention_layers or ()
    return parts * (layer - sum(i < layer for i in attending))


class HybridBlock(nn.Module):
    """Pre-norm residuals around a mixer, named as in checkpoints, and an mlp."""

    def __init__(
        self, config: ModelConfig, build: Build, name: str, mixer: nn.Module, mlp: nn.Module | None
    ) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.add_module(name, mixer)
        self._name, self._scale = name, config.residual_scale
        self.post_attention_layernorm = make_norm(config, build) if mlp is not None else None
        self.mlp = mlp

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD = scaled(self.get_submodule(self._name)(h_TD, batch), self._scale)
        if self.mlp is None or self.post_attention_layernorm is None:
            return h_TD, stream_TD
        h_TD, stream_TD = self.post_attention_layernorm(h_TD, stream_TD)
        return scaled(self.mlp(h_TD), self._scale), stream_TD


class GateAttention(Attention):
    """Attention with gated outputs; one projection computes queries and gates, head by head."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        keys = heads.keys.times(config.head_dim)
        parts = Split(heads.queries.times(2 * config.head_dim), keys, keys)
        self.qkv_proj = ColumnParallel(build, config.hidden_size, parts, bias=config.qkv_bias)
        self._sizes = list(parts.sizes)
        assert isinstance(self.attn, PagedAttention)

    def of_rows(self, x_TD: X, batch: ForwardBatch) -> X:
        rows = self.qkv_proj(x_TD)
        if isinstance(rows, TracedTensor):
            return self.o_proj(self._traced(rows, batch))
        wide, k, v = rows.split(self._sizes, -1)
        heads = wide.unflatten(1, (self.attn.layer.num_heads, -1))
        q, gate = (part.flatten(1) for part in heads.chunk(2, -1))
        out = self.attn(torch.cat((q, k, v), -1), batch)
        return self.o_proj(out * gate.sigmoid())

    def _traced(self, rows: TracedTensor, batch: ForwardBatch) -> TracedTensor:
        """Input of the last projection."""
        tracer, (queries, *rest) = recurrent(rows), self._sizes
        width = self.attn.layer.head_dim
        gates = [i for i in range(queries) if i // width % 2]
        others = [i for i in range(queries) if not i // width % 2]
        keys_and_values = range(queries, queries + sum(rest))
        gate = tracer.take_columns(rows, gates)
        out = self.attn(tracer.take_columns(rows, [*others, *keys_and_values]), batch)
        return tracer.gate(out, Columns(gate), GateRule(function="sigmoid"))


def _kinds(raw: Raw, default: Callable[[int], str]) -> list[str]:
    kinds = raw.get("layer_types") or [default(i) for i in range(raw.get("num_hidden_layers") or 0)]
    if not isinstance(kinds, list) or len(kinds) != raw.get("num_hidden_layers"):
        raise ConfigError("config.json: layer_types must have an entry for each layer")
    return kinds


def _lfm2(raw: Raw) -> Raw:
    full = raw.get("full_attn_idxs")
    inner = raw.get("intermediate_size") or raw.get("block_ff_dim") or 0
    if raw.get("block_auto_adjust_ff_dim", True) and "num_experts" not in raw:
        of = raw.get("block_multiple_of") or 256
        inner = int(int(2 * inner / 3) * (raw.get("block_ffn_dim_multiplier") or 1.0))
        inner = of * -(-inner // of)
    kinds = _kinds(raw, lambda i: "full_attention" if full is None or i in full else "conv")
    taps = raw.get("conv_L_cache", 3)
    return split_layers(kinds, (((taps, raw.get("hidden_size") or 1), False),)) | {
        "intermediate_size": inner,
        "qk_norm": "head",
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", raw.get("tie_embedding", True))),
    }


def _lfm2_moe(raw: Raw) -> Raw:
    moe = MoEConfig(
        num_experts=raw.get("num_experts") or 0,
        top_k=raw.get("num_experts_per_tok", 4),
        inner=raw.get("moe_intermediate_size") or 0,
        scores="sigmoid",
        normalise=bool(raw.get("norm_topk_prob", True)),
        scale=raw.get("routed_scaling_factor", 1.0),
        correction=bool(raw.get("use_expert_bias", True)),
        layers=sparse_layers(raw, first=raw.get("num_dense_layers", 2)),
    )
    return _lfm2(raw) | {"moe": moe}


def delta_shape(raw: Raw) -> DeltaShape:
    """Sizes of gated delta nets as config.json spells them."""
    return DeltaShape(
        dim=raw.get("hidden_size") or 1,
        key_heads=raw.get("linear_num_key_heads", 16),
        value_heads=raw.get("linear_num_value_heads", 32),
        key_dim=raw.get("linear_key_head_dim", 128),
        value_dim=raw.get("linear_value_head_dim", 128),
        taps=raw.get("linear_conv_kernel_dim", 4),
        eps=raw.get("rms_norm_eps", 1e-6),
    )


def _qwen3_next(raw: Raw) -> Raw:
    raw = {"partial_rotary_factor": 0.25, "head_dim": 256} | raw
    every = raw.get("full_attention_interval", 4)
    kinds = _kinds(raw, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    bias = bool(raw.get("attention_bias", False))
    found = split_layers(kinds, delta_shape(raw).parts) | {
        "rope": common_fields(raw)["rope"],
        "head_dim": raw["head_dim"],
        "norm_offset": 1.0,
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
    }
    if not raw.get("num_experts"):
        return found
    moe = MoEConfig(
        num_experts=raw["num_experts"],
        top_k=raw.get("num_experts_per_tok", 10),
        inner=raw.get("moe_intermediate_size") or 0,
        normalise=bool(raw.get("norm_topk_prob", True)),
        layers=sparse_layers(raw),
        shared=raw.get("shared_expert_intermediate_size", 0),
        shared_gate=True,
    )
    return found | {"moe": moe, "intermediate_size": raw.get("intermediate_size") or 1}


_FAMILIES: Mapping[str, Callable[[Raw], Raw]] = MappingProxyType(
    {
        "Lfm2ForCausalLM": _lfm2,
        "Lfm2MoeForCausalLM": _lfm2_moe,
        "Qwen3NextForCausalLM": _qwen3_next,
        "Qwen3_5ForCausalLM": _qwen3_next,
        "Qwen3_5MoeForCausalLM": _qwen3_next,
    }
)


class Lfm2(Decoder):
    """Gated short convolutions, and attention every few layers."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "o_proj": ("out_proj",),
        "q_norm": ("q_layernorm",),
        "k_norm": ("k_layernorm",),
        "input_layernorm": ("operator_norm",),
        "post_attention_layernorm": ("ffn_norm",),
        "norm": ("embedding_norm",),
        "mlp": ("feed_forward",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        mlp = make_mlp(config, build, layer)
        if layer in (config.attention_layers or ()):
            mixer = Attention(config, build, layer, ropes)
            return HybridBlock(config, build, "self_attn", mixer, mlp)
        part, bias = first_part(config, layer, 1), bool(config.raw.get("conv_bias", False))
        taps = config.states[part].shape[0]
        conv = ShortConv(build, config.hidden_size, taps, part, bias=bias)
        return HybridBlock(config, build, "conv", conv, mlp)

    def source_name(self, source: str) -> str:
        """The selection bias of experts is stored beside the router."""
        return source.replace("gate.e_score_correction_bias", "expert_bias")


class Qwen3Next(Decoder):
    """Gated delta nets, and gated attention every fourth layer."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FUSED,
        "gate_norm": ("norm",),
        "shared_experts": ("shared_expert",),
    }
    mixer: ClassVar[type[GatedDelta]] = GatedDelta

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        mlp = make_mlp(config, build, layer)
        if layer in (config.attention_layers or ()):
            attention = GateAttention(config, build, layer, ropes)
            return HybridBlock(config, build, "self_attn", attention, mlp)
        delta = self.mixer(build, delta_shape(config.raw), first_part(config, layer, 2))
        return HybridBlock(config, build, "linear_attn", delta, mlp)


class SplitQwen3Next(Qwen3Next):
    """GGUF: the output gates have a separate projection."""

    mixer: ClassVar[type[GatedDelta]] = HalfSplitDelta


class Qwen35(Qwen3Next):
    """The inputs of delta nets are projected one by one."""

    mixer: ClassVar[type[GatedDelta]] = SplitDelta


_MODELS: Mapping[str, type[Decoder]] = MappingProxyType(
    {
        "Lfm2ForCausalLM": Lfm2,
        "Lfm2MoeForCausalLM": Lfm2,
        "Qwen3NextForCausalLM": Qwen3Next,
        "Qwen3_5ForCausalLM": Qwen35,
        "Qwen3_5MoeForCausalLM": Qwen35,
    }
)


def MODEL(config: ModelConfig, build: Build) -> Decoder:  # noqa: N802 - the name families share
    """The class of the architecture."""
    made = config.raw.get("sylvan")
    if isinstance(made, dict) and made.get("delta_inputs") == "split":
        return SplitQwen3Next(config, build)
    return _MODELS[config.architecture](config, build)
