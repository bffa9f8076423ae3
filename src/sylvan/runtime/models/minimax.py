"""MiniMax-Text-01 and M1: lightning attention (one matrix per head) and full attention.

Residuals are normed rows, and both sides of an addition have a factor (arXiv:2501.08313).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.recurrent import Columns, GateRule, SpaceLayer, recurrent
from sylvan.kernels.scan.spans import scan
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.layers.recurrent import Recurrent, spans_of, state_of
from sylvan.runtime.models.config import ModelConfig, MoEConfig, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Attention, Decoder, Ropes, make_mlp, make_norm
from sylvan.runtime.models.hybrid import first_part, split_layers

Raw = dict[str, Any]

_NORM_EPS = 1e-6  # norm within lightning attention; independent of the model's epsilon
_FACTORS = (
    ("full_attn_alpha_factor", "layernorm_full_attention_alpha"),
    ("full_attn_beta_factor", "layernorm_full_attention_beta"),
    ("linear_attn_alpha_factor", "layernorm_linear_attention_alpha"),
    ("linear_attn_beta_factor", "layernorm_linear_attention_beta"),
    ("mlp_alpha_factor", "layernorm_mlp_alpha"),
    ("mlp_beta_factor", "layernorm_mlp_beta"),
)
"""Field names in transformers and as published."""


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `MiniMaxForCausalLM` and of the architectures as published."""
    layers = raw.get("num_hidden_layers") or 0
    kinds = raw.get("layer_types")
    if kinds is None and isinstance(raw.get("attn_type_list"), list):
        kinds = ["full_attention" if kind else "linear_attention" for kind in raw["attn_type_list"]]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError("config.json: layer_types must have an entry for each layer")
    if raw.get("postnorm") is False or raw.get("shared_intermediate_size"):
        raise ConfigError(
            "config.json: postnorm must be true and shared_intermediate_size 0 in a MiniMax"
        )
    fields = common_fields(raw)
    rope, rotary_dim = fields["rope"], raw.get("rotary_dim")
    if rotary_dim and rope.partial_rotary_factor == 1.0:
        rope = msgspec.structs.replace(rope, partial_rotary_factor=rotary_dim / fields["head_dim"])
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", 8),
        top_k=raw.get("num_experts_per_tok", 2),
        inner=raw.get("intermediate_size") or 0,
        normalise=True,
        layers=tuple(range(layers)),
    )
    size = fields["head_dim"]
    state = ((fields["num_attention_heads"], size, size), True)
    return make_config(fields | split_layers(kinds, (state,)) | {"moe": moe, "rope": rope})


class LightningAttention(Recurrent):
    """Linear attention: a decaying sum of key-value products per head: (T, D) -> (T, D)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        part, size = first_part(config, layer, 1), config.head_dim
        heads = build.mesh.share(config.num_attention_heads, "num_attention_heads")
        dim, inner = config.hidden_size, heads.times(size)
        self.state_shapes = {part: (heads.size, size, size)}
        self._part, self._heads = part, heads.size
        fading = Split(heads).take(_decay(config, layer), 0)
        self._keep = fading.exp().float()[:, None, None].to(build.device)
        self._decay = fading.float()
        # The projection has query, key and value of a head together.
        self.joined = ColumnParallel(build, dim, Split(heads.times(3 * size)))
        self.norm = RMSNorm(build, Split(inner), _NORM_EPS)
        self.output_gate = ColumnParallel(build, dim, Split(inner))
        self.out_proj = RowParallel(build, inner, dim)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.out_proj(self._traced(x_TD))
        assert isinstance(x_TD, torch.Tensor)
        joined = F.silu(self.joined(x_TD)).unflatten(-1, (self._heads, -1))
        q, k, v = (part.float() for part in joined.chunk(3, -1))

        def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = held * self._keep + v[rows][..., None] * k[rows][:, :, None]
            return new, (new * q[rows][:, :, None]).sum(-1)

        out = scan(state_of(batch, self._part), spans_of(batch), torch.empty_like(q), step)
        normed, _ = self.norm(out.flatten(1).to(x_TD.dtype))
        return self.out_proj(self.output_gate(x_TD).sigmoid() * normed)

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """As a state-space scan without time steps: B are keys, C queries, inputs the values."""
        joined, tracer = ops.activation(self.joined(x), "silu"), recurrent(x)
        (size, _), heads = self.state_shapes[self._part][1:], self._heads
        order = [
            (3 * head + part) * size + i
            for part in range(3)
            for head in range(heads)
            for i in range(size)
        ]
        rows, inner = tracer.take_columns(joined, order), heads * size
        layer = SpaceLayer(
            part=self._part,
            width=size,
            decay=self._decay,
            skip=torch.zeros(heads),
            groups=heads,
            states=size,
        )
        keys_and_queries = Columns(rows, inner), Columns(rows)
        out = tracer.space(Columns(rows, 2 * inner), None, keys_and_queries, layer)
        normed, _ = self.norm(ops.cast(out, joined))
        return tracer.gate(normed, Columns(self.output_gate(x)), GateRule(function="sigmoid"))


def _decay(config: ModelConfig, layer: int) -> torch.Tensor:
    """Logarithm of the decay of a head's matrix per row. Shape: float64 (H,)."""
    heads, last = config.num_attention_heads, config.num_hidden_layers - 1
    slope = (2 ** (-8 / heads)) ** torch.arange(1, heads + 1, dtype=torch.float64)
    return -slope * (1 - layer / (last + 1e-5) + 1e-5)


class MiniMaxBlock(nn.Module):
    """norm, then a x + b attention(x); norm, then c x + d experts(x)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        full = layer in (config.attention_layers or ())
        self.input_layernorm = make_norm(config, build)
        self.self_attn: nn.Module = (
            Attention(config, build, layer, ropes)
            if full
            else LightningAttention(config, build, layer)
        )
        self.post_attention_layernorm = make_norm(config, build)
        self.mlp = make_mlp(config, build, layer)
        raw = config.raw
        found = [float(raw.get(ours, raw.get(theirs, 1.0))) for ours, theirs in _FACTORS]
        self._attend = found[:2] if full else found[2:4]
        self._feed = found[4:]

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, None]:
        h_TD, _ = self.input_layernorm(x_TD)
        x_TD = _added(h_TD, self.self_attn(h_TD, batch), *self._attend)
        h_TD, _ = self.post_attention_layernorm(x_TD)
        return _added(h_TD, self.mlp(h_TD), *self._feed), None


def _added(x: X, y: X, x_factor: float, y_factor: float) -> X:
    if isinstance(x, TracedTensor):
        assert isinstance(y, TracedTensor)
        return recurrent(x).weighted(x, y, x_factor, y_factor)
    return x.float() * x_factor + y.float() * y_factor


class LightningMiniMax(Decoder):
    """Mixtral's names of experts."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": FUSED["qkv_proj"],
        "mlp": ("block_sparse_moe",),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return MiniMaxBlock(config, build, layer, ropes)

    def source_name(self, source: str) -> str:
        """The name of the joined projection of lightning attention."""
        return source.replace(".self_attn.joined.", ".self_attn.qkv_proj.")

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of tables that the config implies."""
        ends = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        layers = range(self.config.num_hidden_layers)
        return (*super().unused, *(f"layers.{i}.self_attn.{end}" for i in layers for end in ends))


MODEL = LightningMiniMax
