"""DeepSeek V4: windows and compressed KV entries, hyper-connections, and experts by token id.

Tensors have the names of the published checkpoints; transformers writes some under other names. The
first layers select experts by token id (`tid2eid`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.config.compressed import CompressedLayout, compressed_layout
from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, Rope, RouterScores, TracedTensor, X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.compressed import CompressedKeyAttention, CompressedShape, KeptEntries
from sylvan.runtime.layers.moe import MoE
from sylvan.runtime.layers.streams import StreamMix, StreamShape, StreamSum
from sylvan.runtime.models.config import (
    CompressedKV,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    StatePart,
    common_fields,
    make_config,
)
from sylvan.runtime.models.decoder import Decoder, Ropes, make_norm, moe_shape
from sylvan.runtime.models.rope import RopeParams, parse_rope

Raw = dict[str, Any]

_SCORES: Mapping[str, RouterScores] = {
    "sqrtsoftplus": "sqrt_softplus",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
}
_HASHED = 3  # default number of layers that select experts by token id
_TURNING = 64
_STREAMS = re.compile(r"\bhc_(attn|ffn|head)_(fn|base|scale)$")


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `DeepseekV4ForCausalLM`.

    Raises:
        ConfigError: as other families, or a size is impossible.
    """
    layout = compressed_layout(raw)
    inner = raw.get("moe_intermediate_size") or 1
    main, _ = ropes_of(raw, layout)
    fields = common_fields(
        raw
        | {"num_key_value_heads": 1, "intermediate_size": inner, "rope_scaling": None}
        | {"rope_parameters": None, "head_dim": layout.head_dim}
    )
    shapes = [shape for layer in layout.layers if layer for shape in layer.state]
    found = {
        "raw": raw,
        "rope": main,
        "layer_windows": (layout.window,) * len(layout.layers),
        "latent": LatentConfig(
            q_rank=raw.get("q_lora_rank"),
            latent=layout.head_dim,
            nope=0,
            rope_dim=0,
            value=layout.head_dim,
        ),
        "compressed": CompressedKV(
            layers=layout.kv_layers, columns=layout.columns, block=layout.block
        ),
        "states": tuple(StatePart(shape, exact=True) for shape in shapes),
        "moe": _mixture(raw, inner),
    }
    config = make_config(fields | found)
    _check(config)
    return config


def ropes_of(raw: Raw, layout: CompressedLayout) -> tuple[RopeParams, RopeParams]:
    """Rotary rules of layers without and with entries."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    part = raw.get("partial_rotary_factor")
    part = (raw.get("qk_rope_head_dim") or _TURNING) / layout.head_dim if part is None else part
    if not (isinstance(given, dict) and isinstance(given.get("compress"), dict)):
        scaled = {"rope_theta": raw.get("compress_rope_theta", 160_000.0)} | dict(given)
        if "yarn" in (scaled.get("type"), scaled.get("rope_type")):
            scaled.setdefault("attention_factor", 1.0)
        scaled["rope_theta"] = raw.get("compress_rope_theta", 160_000.0)
        given = {"main": {"rope_theta": raw.get("rope_theta", 10_000.0)}, "compress": scaled}
    positions = raw.get("max_position_embeddings")
    positions = positions if isinstance(positions, int) and positions > 0 else 1
    both = {
        kind: parse_rope(
            {"rope_parameters": {"partial_rotary_factor": part} | given.get(kind, {})}, positions
        )
        for kind in ("main", "compress")
    }
    return both["main"], both["compress"]


def _mixture(raw: Raw, inner: int) -> MoEConfig:
    kind = raw.get("scoring_func", "sqrtsoftplus")
    if kind not in _SCORES:
        raise ConfigError(f"config.json: unknown scoring_func {kind!r}")
    limit = raw.get("swiglu_limit", 10.0)
    return MoEConfig(
        num_experts=raw.get("n_routed_experts") or 256,
        top_k=raw.get("num_experts_per_tok") or 6,
        inner=inner,
        scores=_SCORES[kind],
        normalise=True,
        scale=raw.get("routed_scaling_factor", 1.5),
        correction=True,
        layers=tuple(range(raw.get("num_hidden_layers") or 0)),
        shared=inner * (raw.get("n_shared_experts") or 1),
        limit=limit,
        shared_limit=limit,
        clamp="inputs",
    )


def hashed_layers(raw: Raw) -> tuple[int, ...]:
    """Layers that select experts by token id."""
    kinds, count = raw.get("mlp_layer_types"), raw.get("num_hash_layers", _HASHED)
    if isinstance(kinds, list):
        return tuple(i for i, kind in enumerate(kinds) if kind == "hash_moe")
    return tuple(range(min(count, raw.get("num_hidden_layers") or 0)))


def _check(config: ModelConfig) -> None:
    raw, heads = config.raw, config.num_attention_heads
    default = {"q_lora_rank": 1024, "o_lora_rank": 1024, "index_n_heads": 64, "index_topk": 512}
    default |= {"o_groups": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20}
    for name, value in default.items():
        found = raw.get(name, value)
        if not isinstance(found, int) or found < 1:
            raise ConfigError(f"config.json: {name} must be a positive integer, it is {found!r}")
    if heads % raw.get("o_groups", 8):
        raise ConfigError(f"config.json: o_groups must divide {heads} heads")


class HashMoE(MoE):
    """Selects experts by token id; a router gives their weights."""

    tid2eid: LinearWeight

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        assert config.moe is not None
        super().__init__(build, replace(moe_shape(config.moe, config, layer), correction=False))
        size = config.vocab_size, config.moe.top_k
        table = torch.empty(size, dtype=torch.int32, device=build.device)
        self.tid2eid = nn.Parameter(table, requires_grad=False)

    def of_tokens(self, x_TD: X, ids_T: torch.Tensor) -> X:
        """Shape: (T, D) -> (T, D)."""
        logits_TE, table = self.gate(x_TD, out_f32=True), self.tid2eid
        if isinstance(x_TD, TracedTensor):
            return self.routed(x_TD, logits_TE, replace(self._routing, by_token=table))
        assert isinstance(table, torch.Tensor)
        return self.routed(x_TD, logits_TE, replace(self._routing, ids=table[ids_T.long()]))


class StreamBlock(nn.Module):
    """Attention, then experts, each between `StreamMix.collapse` and `StreamMix.expand`."""

    def __init__(
        self, config: ModelConfig, build: Build, layer: int, ropes: Ropes, layout: CompressedLayout
    ) -> None:
        super().__init__()
        raw, dim, entries = config.raw, config.hidden_size, layout.layers[layer]
        shape = CompressedShape(
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            window=layout.window,
            q_rank=raw.get("q_lora_rank", 1024),
            groups=raw.get("o_groups", 8),
            group_rank=raw.get("o_lora_rank", 1024),
            index_heads=raw.get("index_n_heads", 64),
            top_k=raw.get("index_topk", 512),
            eps=config.rms_norm_eps,
        )
        rope: Rope = ropes.by(ropes_of(raw, layout)[entries is not None])
        before = sum(len(found.state) for found in layout.layers[:layer] if found)
        kept = None
        if entries is not None:
            pool = len(layout.layers) + entries.kv_layer
            kept = KeptEntries(layer=entries, pool=pool, part=before)
        self.attn_norm, self.ffn_norm = make_norm(config, build), make_norm(config, build)
        self.attn = CompressedKeyAttention(build, dim, shape, rope, layer, kept)
        assert config.moe is not None
        hashed = layer in hashed_layers(raw)
        self.ffn = (
            HashMoE(config, build, layer)
            if hashed
            else MoE(build, moe_shape(config.moe, config, layer))
        )
        self.hc_attn, self.hc_ffn = (StreamMix(build, dim, stream_shape(config)) for _ in range(2))

    def forward(self, streams: X, batch: ForwardBatch) -> X:
        """Shape: (T, S D) -> (T, S D)."""
        like = self.attn_norm.weight
        row_TD, mix = self.hc_attn.collapse(streams)
        out_TD = self.attn(ops.cast(self.attn_norm(row_TD)[0], like), batch)
        streams = self.hc_attn.expand(streams, out_TD, mix)
        row_TD, mix = self.hc_ffn.collapse(streams)
        h_TD = ops.cast(self.ffn_norm(row_TD)[0], like)
        if isinstance(self.ffn, HashMoE):
            out_TD = self.ffn.of_tokens(h_TD, batch.input_ids_T)
        else:
            out_TD = self.ffn(h_TD)
        return self.hc_ffn.expand(streams, out_TD, mix)


def stream_shape(config: ModelConfig) -> StreamShape:
    """Sizes of the streams."""
    raw = config.raw
    return StreamShape(
        streams=raw.get("hc_mult", 4),
        rounds=raw.get("hc_sinkhorn_iters", 20),
        eps=raw.get("hc_eps", 1e-6),
        norm_eps=config.rms_norm_eps,
    )


class DeepseekV4(Decoder):
    """Maps tensor names, and carries streams between blocks."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        if build.mesh.stage.count > 1:
            raise ConfigError(
                f"parallel.pp={build.mesh.stage.count}: layers of {config.architecture} pass on "
                "more than one stream; use parallel.pp=1"
            )
        self._layout = compressed_layout(config.raw)
        super().__init__(config, build)
        self.hc_head = StreamSum(build, config.hidden_size, stream_shape(config))

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return StreamBlock(config, build, layer, ropes, self._layout)

    def rename(self, name: str) -> str:
        """Map published names, and those that transformers writes, to published ones."""
        name = super().rename(name).replace(".attn.norm.", ".attn.kv_norm.")
        name = name.replace("hc_head.hc_", "hc_head_")
        name = re.sub(r"^embed\.", "embed_tokens.", re.sub(r"^head\.", "lm_head.", name))
        name = re.sub(r"\.scale$", ".weight_scale_inv", name)  # of a quantised matrix
        return name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")

    def source_name(self, source: str) -> str:
        """Map names: stream parameters are stored beside layers, `tid2eid` beside the router."""
        source = source.replace(".ffn.tid2eid", ".ffn.gate.tid2eid")
        return re.sub(r"\b(hc_attn|hc_ffn|hc_head)\.(fn|base|scale)$", r"\1_\2", source)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        streams = ops.spread_streams(x_TD, stream_shape(self.config).streams)
        for block in self.layers:
            streams = block(streams, batch)
        return self.norm(self.hc_head(streams))[0]


MODEL = DeepseekV4
