"""Building blocks of decoder-only families: attention, feed-forward, blocks, and the stack.

A family file parses its config.json into the switches of `ModelConfig`, selects a block, and maps
the checkpoint's tensor names if they differ from the names here.

Shapes: T tokens of all requests, R rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, AttentionVariant, Rope, X
from sylvan.kernels.experts import Routing
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.attention import (
    PagedAttention,
    RaggedAttention,
    SpecialAttention,
)
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding, VocabEmbedding
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel, VocabHead
from sylvan.runtime.layers.mesh import Split, among_experts
from sylvan.runtime.layers.mlp import MLP, GatedMLP
from sylvan.runtime.layers.moe import MoE, MoEShape
from sylvan.runtime.layers.norm import LayerNorm, RMSNorm
from sylvan.runtime.models.config import ModelConfig, MoEConfig, QueryScaling
from sylvan.runtime.models.heads import UNUSED_HEADS, draft_layers, make_score
from sylvan.runtime.models.rope import RopeParams, rope_table
from sylvan.runtime.models.text_parts import IMAGES, canonical, text_name

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parts of each joined module, as most checkpoints name them."""


_SLACK_ROWS = 32  # after spare rows: kernels then read them without a copy


class Ropes:
    """Rotary tables of a model: one object per rule, so that each table is stored once."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        self._config, self._build = config, build
        self._made: dict[RopeParams, Rope] = {}
        self._scales = _query_scales(config.query_scaling, build)

    def of(self, layer: int) -> Rope | None:
        """The table of a layer; None if it has no rotary positions."""
        config = self._config
        if layer in config.nope_layers or config.learned_positions:
            return None
        local = config.local_rope if config.layer_windows[layer] is not None else None
        return self.by(local or config.rope)

    def by(self, params: RopeParams) -> Rope:
        """The table of a rule."""
        config, build = self._config, self._build
        if params not in self._made:
            positions = config.max_position_embeddings
            whole = build.device.type != "meta"  # a model on the meta device needs only a few rows
            length = build.length if whole else 1
            table = rope_table(params, config.head_dim, positions, length)
            if spare := build.spare_positions if whole else 0:
                rows = len(table) + spare
                table = functional.pad(table, (0, 0, 0, spare + _SLACK_ROWS))[:rows]
            self._made[params] = Rope(table.to(build.device), config.rope_interleaved)
        return self._made[params]

    def scales_of(self, layer: int) -> torch.Tensor | None:
        """Query factors of a layer by position; None if it has none."""
        rule = self._config.query_scaling
        if rule is None or layer not in (rule.layers or range(self._config.num_hidden_layers)):
            return None
        return self._scales


def _query_scales(rule: QueryScaling | None, build: Build) -> torch.Tensor | None:
    """float32 (positions,); None if the context is too short for scaling to matter."""
    if rule is None or build.length + rule.shift <= rule.every:
        return None
    if rule.log:
        lengths = torch.arange(1, build.length + 1, dtype=torch.float64)
        return (lengths.log() / math.log(rule.every)).clamp(min=1.0).float().to(build.device)
    far = torch.floor((torch.arange(build.length) + rule.shift) / rule.every)
    return (1 + rule.strength * torch.log1p(far)).to(build.device)


def make_norm(config: ModelConfig, build: Build) -> RMSNorm | LayerNorm:
    """The family's norm over the hidden size."""
    size, eps, weight = config.hidden_size, config.rms_norm_eps, config.norm_weight
    if config.norm == "rms":
        return RMSNorm(build, size, eps, config.norm_offset, weight=weight)
    return LayerNorm(build, size, eps, bias=config.norm_bias, weight=weight)


def make_mlp(config: ModelConfig, build: Build, layer: int) -> nn.Module:
    """The family's feed-forward block of a layer."""
    if config.moe is not None and layer in config.moe.layers:
        return MoE(build, moe_shape(config.moe, config, layer))
    if config.moe is not None:
        build = replace(build, mesh=among_experts(build.mesh))
    sizes = config.hidden_size, config.intermediate_size
    kind = GatedMLP if config.gated_mlp else MLP
    return kind(build, *sizes, config.hidden_act, bias=config.mlp_bias)


def moe_shape(moe: MoEConfig, config: ModelConfig, layer: int) -> MoEShape:
    """Sizes of the MoE block of a layer."""
    routing = Routing(
        top_k=moe.top_k,
        scores=moe.scores,
        normalise=moe.normalise,
        scale=moe.scale,
        groups=moe.groups,
        kept_groups=moe.kept_groups,
        group_rank=moe.group_rank,
        jitter=moe.jitter,
        scale_inputs=moe.scale_inputs,
    )
    return MoEShape(
        dim=config.hidden_size,
        inner=moe.inner,
        num_experts=moe.num_experts,
        routing=routing,
        act=config.hidden_act,
        shared=moe.shared,
        shared_gate=moe.shared_gate,
        correction=moe.correction,
        router_bias=moe.router_bias,
        expert_bias=moe.expert_bias,
        alpha=moe.alpha,
        limit=moe.limit,
        shared_limit=moe.shared_limit,
        clamp=moe.clamp,
        layer=layer,
    )


def special_attention(
    config: ModelConfig, build: Build, layer: int, ropes: Ropes
) -> AttentionVariant | None:
    """Special features of a layer's attention; None if the context is too short to need them."""
    chunk, scales = config.attention_chunk, ropes.scales_of(layer)
    if chunk is not None and (layer in config.nope_layers or build.length <= chunk):
        chunk = None
    slopes = None
    if config.alibi_slopes:
        heads = build.mesh.query_heads(config.num_attention_heads)
        slopes = Split(heads).take(torch.tensor(config.alibi_slopes, device=build.device), 0)
    if not (chunk or config.qk_norm_last) and scales is None and slopes is None:
        return None
    return AttentionVariant(
        chunk=chunk, query_scales=scales, norm_last=config.qk_norm_last, slopes=slopes
    )


class Attention(nn.Module):
    """Grouped-query attention; positions, windows and norms of heads by the config."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.row_groups = build.mesh.row_groups
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (share.times(config.head_dim) for share in heads)
        parts = Split(queries, keys, keys)
        self.qkv_proj = ColumnParallel(build, config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = RowParallel(build, queries, config.hidden_size, bias=config.o_bias)
        self.sinks = build.empty(Split(heads.queries)) if config.sinks else None
        self._limit = config.qkv_limit
        rope = ropes.of(layer)
        self.q_norm = self.k_norm = None
        if config.qk_norm and not (config.qk_norm == "unit" and rope is None):
            whole = config.qk_norm == "whole"
            one = config.head_dim, config.head_dim
            widths = (Split(queries), Split(keys)) if whole else one
            eps, offset = config.rms_norm_eps, config.norm_offset
            weight = config.qk_norm != "unit"
            self.q_norm = RMSNorm(build, widths[0], eps, offset, weight=weight)
            self.k_norm = RMSNorm(build, widths[1], eps, offset, weight=weight)
        spec = AttentionLayer(
            index=config.kv_index(layer),
            num_heads=heads.queries.size,
            num_kv_heads=heads.keys.size,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
            window=config.layer_windows[layer],
            softcap=config.attention_softcap or None,
            sinks=self.sinks,
            causal=config.causal,
        )
        special = special_attention(config, build, layer, ropes)
        if special is not None:
            self.attn = SpecialAttention(spec, rope, self.q_norm, self.k_norm, special)
        else:
            kind = PagedAttention if config.causal else RaggedAttention
            self.attn = kind(spec, rope, self.q_norm, self.k_norm)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D), the same on every rank."""
        if self.row_groups is None:
            return self.of_rows(x_TD, batch)
        return self.row_groups.attend(self.of_rows, x_TD, batch)

    def of_rows(self, x_TD: X, batch: ForwardBatch) -> X:
        """Attend for rows whose KV this rank holds."""
        qkv = self.qkv_proj(x_TD)
        qkv = ops.clamp(qkv, self._limit) if self._limit else qkv
        return self.o_proj(self.attn(qkv, batch))


class PreNorm(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the norm ops also add the residual."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = Attention(config, build, layer, ropes)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        self._scale = config.residual_scale

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD = scaled(self.self_attn(h_TD, batch), self._scale)
        h_TD, stream_TD = self.post_attention_layernorm(h_TD, stream_TD)
        return scaled(self.mlp(h_TD), self._scale), stream_TD


class Sandwich(nn.Module):
    """A norm before and after both attention and mlp (Gemma 2 and 3, GLM-4, HyperCLOVA X)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = Attention(config, build, layer, ropes)
        self.post_attention_layernorm = make_norm(config, build)
        self.pre_feedforward_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        self.post_feedforward_layernorm = make_norm(config, build)
        self._scale = config.residual_scale

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD, _ = self.post_attention_layernorm(self.self_attn(h_TD, batch))
        h_TD, stream_TD = self.pre_feedforward_layernorm(scaled(h_TD, self._scale), stream_TD)
        h_TD, _ = self.post_feedforward_layernorm(self.mlp(h_TD))
        return scaled(h_TD, self._scale), stream_TD


class PostNorm(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2, EXAONE 4)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.self_attn = Attention(config, build, layer, ropes)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        self.post_feedforward_layernorm = make_norm(config, build)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X | None]:
        like = self.post_attention_layernorm.weight
        h_TD, _ = self.post_attention_layernorm(self.self_attn(ops.cast(x_TD, like), batch))
        x_TD = ops.add(x_TD, h_TD)
        h_TD, _ = self.post_feedforward_layernorm(self.mlp(ops.cast(x_TD, like)))
        return ops.add(x_TD, h_TD), None


class Parallel(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), both from one norm (Cohere, Phi, GPT-J, Falcon)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = Attention(config, build, layer, ropes)
        self.mlp = make_mlp(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        return ops.add(self.self_attn(h_TD, batch), self.mlp(h_TD)), stream_TD


class ParallelTwoNorms(nn.Module):
    """x + attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX, larger Falcons)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.self_attn = Attention(config, build, layer, ropes)
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        g_TD, _ = self.post_attention_layernorm(stream_TD)
        return ops.add(self.self_attn(h_TD, batch), self.mlp(g_TD)), stream_TD


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head. Families subclass it, or use it with their config."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = FUSED
    absent: tuple[str, ...] = ()
    """Name prefixes of tensors that other pipeline stages hold."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config = config
        ropes = Ropes(config, build)
        ids, dim = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabEmbedding(build, ids, dim, config.embed_scale)
        self.embed_positions = None
        if config.learned_positions:
            self.embed_positions = Embedding(build, _positions(config, build), dim)
        self.layers = nn.ModuleList(
            self.block(config, build, i, ropes) for i in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config, build)
        self.edited_layers = config.media.edited_layers if config.media else ()
        self.lm_head, self.score = None, make_score(config, build)
        if config.head == "lm":
            self.lm_head = VocabHead(build, dim, ids, bias=config.head_bias)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.embed_tokens.weight

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        """Build one layer; families override this for other arrangements."""
        return PreNorm(config, build, layer, ropes)

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a checkpoint tensor to the layout of its parameter."""
        return tensor

    @property
    def has_one_stream(self) -> bool:
        """Whether layers pass on one residual stream only, as pipeline stages need."""
        return type(self).forward is Decoder.forward

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of checkpoint tensors that are ignored."""
        heads = () if self.config.head == "lm" else UNUSED_HEADS
        encoders = () if self.config.media is None else IMAGES
        return (*heads, *draft_layers(self.config), *encoders, *self.absent)

    def rename(self, name: str) -> str:
        """Map a checkpoint's tensor name to the name used here."""
        return canonical(name) if self.config.media is None else text_name(name)

    def embed(self, batch: ForwardBatch) -> X:
        x_TD = self.embed_tokens(batch.input_ids_T)
        if self.embed_positions is None:
            return x_TD
        return ops.add(x_TD, self.embed_positions(batch.positions_T))

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        residual_TD = None
        for layer, block in enumerate(self.layers):
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
            if layer in self.edited_layers:
                if residual_TD is None:
                    x_TD = batch.edited(layer, x_TD)
                else:
                    residual_TD = batch.edited(layer, residual_TD)
        return self.norm(x_TD, residual_TD)[0]

    def head(self, hidden_RD: X) -> X:
        if self.score is not None:
            return self.score(hidden_RD)
        if self.lm_head is None:
            return hidden_RD
        logits_RV = scaled(self.lm_head(hidden_RD, out_f32=True), self.config.logit_scale)
        cap = self.config.logit_softcap
        return ops.softcap(logits_RV, cap) if cap else logits_RV


def scaled(x: X, factor: float) -> X:
    """Multiply x by a factor; emits no op if the factor is 1."""
    return x if factor == 1.0 else ops.scale(x, factor)


def ungroup_qkv(tensor: torch.Tensor, groups: int, head_dim: int) -> torch.Tensor:
    """Reorder rows from (queries, key, value) per group to all queries, all keys, all values."""
    grouped = tensor.unflatten(0, (groups, -1, head_dim))
    parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _positions(config: ModelConfig, build: Build) -> int:
    """Rows of the table of learned positions.

    Raises:
        ConfigError: the context length exceeds the number of positions.
    """
    rows = config.max_position_embeddings
    if build.length > rows:
        raise ConfigError(
            f"this model has {rows} learned positions; it cannot serve a context of {build.length}"
        )
    return rows
