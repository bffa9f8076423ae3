"""Llama, and those that are Llama with a switch: Mistral (window), Qwen2 (bias), Qwen3 (head norm).

Shapes: T tokens of all requests, R rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from sylvan.kernels.api import AttentionLayer, Rope, X
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config, sliding_windows
from sylvan.runtime.models.rope import rope_table


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json of any model served here."""
    fields = common_fields(raw)
    family = fields["architecture"].removesuffix("ForCausalLM")
    bias = bool(raw.get("attention_bias", family == "Qwen2"))
    switches = {
        "qkv_bias": bias,
        "o_bias": bias and family != "Qwen2",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "qk_norm": family == "Qwen3",
        "layer_windows": sliding_windows(raw, default_on=family == "Mistral"),
    }
    return make_config(fields | switches)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, rope: Rope) -> None:
        super().__init__()
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        parts = (config.q_dim, config.kv_dim, config.kv_dim)
        self.qkv_proj = ColumnParallel(build, config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = RowParallel(build, config.q_dim, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(build, dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(build, dim, config.rms_norm_eps)
        spec = AttentionLayer(
            index=layer,
            num_heads=build.shard.share(heads, "num_attention_heads"),
            num_kv_heads=build.shard.share(kv_heads, "num_key_value_heads"),
            head_dim=dim,
            scale=config.attention_scale or dim**-0.5,
            window=config.layer_windows[layer],
            softcap=config.attention_softcap or None,
        )
        norms = (self.q_norm, self.k_norm) if config.qk_norm else (None, None)
        self.attn = PagedAttention(spec, rope, *norms)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        return self.o_proj(self.attn(self.qkv_proj(x_TD), batch))


class Block(nn.Module):
    """Pre-norm block; the residual stream is added by the norms."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, rope: Rope) -> None:
        super().__init__()
        dim, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(build, dim, eps)
        self.self_attn = Attention(config, build, layer, rope)
        self.post_attention_layernorm = RMSNorm(build, dim, eps)
        self.mlp = GatedMLP(build, dim, inner, config.hidden_act, bias=config.mlp_bias)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD, stream_TD = self.post_attention_layernorm(self.self_attn(h_TD, batch), stream_TD)
        return self.mlp(h_TD), stream_TD


class LlamaForCausalLM(nn.Module):
    """Parameter names follow the checkpoint, so loading needs only `fused`."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        positions = config.max_position_embeddings
        table = rope_table(config.rope, config.head_dim, positions, build.length)
        rope = Rope(table.to(build.device))
        self.embed_tokens = Embedding(build, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, build, i, rope) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.lm_head = ColumnParallel(build, config.hidden_size, (config.vocab_size,))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, batch: ForwardBatch) -> X:
        return self.embed_tokens(batch.input_ids_T)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        residual_TD = None
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return self.norm(x_TD, residual_TD)[0]

    def head(self, hidden_RD: X) -> X:
        return self.lm_head(hidden_RD, out_f32=True)


MODEL = LlamaForCausalLM
