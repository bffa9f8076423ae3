"""xLSTM (arXiv:2503.13427): each head keeps a matrix, a sum of keys, and a scale of both.

Shapes: T rows, D hidden, H heads, K columns of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.recurrent import Columns, GateRule, MlstmLayer, recurrent
from sylvan.kernels.scan.spans import scan
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.layers.recurrent import Recurrent, spans_of, state_of
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    architecture_of,
    make_config,
    plain_fields,
)
from sylvan.runtime.models.decoder import Decoder, Ropes, make_norm
from sylvan.runtime.models.hybrid import split_layers
from sylvan.runtime.models.rope import RopeParams

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `xLSTMForCausalLM`.

    Raises:
        ConfigError: sizes are missing or impossible.
        NotNative: it has biases, or joined matrices.
    """
    width, heads = raw.get("hidden_size"), raw.get("num_heads", 8)
    layers = raw.get("num_blocks") or raw.get("num_hidden_layers")
    if not all(isinstance(size, int) and size > 0 for size in (width, heads, layers)):
        raise ConfigError("config.json: hidden_size, num_heads and num_blocks must be integers")
    assert isinstance(width, int)
    assert isinstance(layers, int)
    if raw.get("use_bias") or raw.get("weight_mode", "single") != "single":
        raise NotNative("biases, or joined matrices (weight_mode)")
    keys = int(width * raw.get("qk_dim_factor", 0.5))
    values = int(width * raw.get("v_dim_factor", 1.0))
    if keys % heads or values % heads:
        raise ConfigError(f"config.json: num_heads {heads} does not divide {keys} and {values}")
    keys, values = keys // heads, values // heads
    parts = (((heads, keys * values + keys + 1), True),)  # matrix, sum and scale
    multiple = raw.get("ffn_round_up_to_multiple_of", 64)
    inner = width * raw.get("ffn_proj_factor", 2.667)
    sizes = {
        "architecture": architecture_of(raw),
        "vocab_size": raw.get("vocab_size", 50304),
        "hidden_size": width,
        "intermediate_size": int((inner + multiple - 1) // multiple * multiple),
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": raw.get("max_position_embeddings") or 8192,
        "rope": RopeParams(),
        "rms_norm_eps": raw.get("norm_eps", 1e-6),
        "logit_softcap": raw.get("output_logit_soft_cap") or 0.0,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    return make_config(plain_fields(raw) | split_layers(["xlstm"] * layers, parts) | sizes)


class HeadLayerNorm(nn.Module):
    """A norm of each head, with mean and variance removed. Shape: (T, H, V) -> (T, H V)."""

    def __init__(self, build: Build, columns: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = build.empty(columns), eps

    def forward(self, x_THV: torch.Tensor) -> torch.Tensor:
        normed_THV = F.layer_norm(x_THV, x_THV.shape[-1:], eps=self.eps)
        return normed_THV.flatten(1) * self.weight.float()


class MatrixMemory(Recurrent):
    """The states of a layer, and the gates that change them."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, shape = config.hidden_size, config.states[layer].shape
        heads, keys = shape[0], int(dim * config.raw.get("qk_dim_factor", 0.5)) // shape[0]
        values = (shape[1] - keys - 1) // keys
        self.state_shapes = {layer: shape}
        self._part, self._shape = layer, (heads, keys, values)
        self._cap = float(config.raw.get("gate_soft_cap") or 15.0)
        self._eps = float(config.raw.get("eps", 1e-6))
        self.q, self.k = (Linear(build, dim, (heads * keys,), bias=False) for _ in range(2))
        self.v, self.ogate_preact = (
            Linear(build, dim, (heads * values,), bias=False) for _ in range(2)
        )
        self.igate_preact, self.fgate_preact = (
            Linear(build, dim, (heads,), bias=True) for _ in range(2)
        )
        self.multihead_norm = HeadLayerNorm(build, heads * values, config.rms_norm_eps)
        self.out_proj = Linear(build, heads * values, (dim,), bias=False)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.out_proj(self._traced(x_TD))
        assert isinstance(x_TD, torch.Tensor)
        heads, keys, _ = self._shape
        q_THK, k_THK, v_THV = (
            part(x_TD).float().unflatten(-1, (heads, -1)) for part in (self.q, self.k, self.v)
        )
        gates = (self.igate_preact, self.fgate_preact)
        into_TH, keep_TH = (ops.softcap(gate(x_TD, out_f32=True), self._cap) for gate in gates)
        rows = q_THK * keys**-0.5, k_THK, v_THV, into_TH, F.logsigmoid(keep_TH)
        normed_TC = self.multihead_norm(self._recalled(rows, batch))
        opened_TC = self.ogate_preact(x_TD).float().sigmoid()
        return self.out_proj((opened_TC * normed_TC).to(x_TD.dtype))

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        tracer, (heads, keys, values) = recurrent(x), self._shape
        layer = MlstmLayer(
            part=self._part, heads=heads, key_dim=keys, value_dim=values, eps=self._eps
        )
        q, k, v = (Columns(part(x)) for part in (self.q, self.k, self.v))
        gates = (self.igate_preact, self.fgate_preact)
        into, keep = (ops.softcap(gate(x, out_f32=True), self._cap) for gate in gates)
        y = tracer.mlstm((q, k, v), (into, keep), layer)
        norm = self.multihead_norm
        rule = GateRule(
            function="sigmoid", norm="layer", weight=norm.weight, parts=heads, eps=norm.eps
        )
        return tracer.gate(y, Columns(self.ogate_preact(x)), rule)

    def _recalled(self, rows: tuple[torch.Tensor, ...], batch: ForwardBatch) -> torch.Tensor:
        """Query the matrices: float32 (T, H, V).

        `rows`: queries, keys and values, and logarithms of input and forget gates.
        """
        _, keys, values = self._shape

        def step(held: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            query, key, value, into, keep = (x[at] for x in rows)
            matrix, total, scale = held.split((keys * values, keys, 1), -1)
            most = torch.maximum(keep[..., None] + scale, into[..., None])
            kept, new = (keep[..., None] + scale - most).exp(), (into[..., None] - most).exp()
            pairs = (key[..., None] * value[..., None, :]).flatten(2)
            matrix, total = kept * matrix + new * pairs, kept * total + new * key
            known = (query[..., None] * matrix.unflatten(-1, (keys, values))).sum(-2)
            size = (query * total).sum(-1, keepdim=True).abs()
            out = known / (torch.maximum(size, (-most).exp()) + self._eps)
            return torch.cat((matrix, total, most), -1), out

        return scan(state_of(batch, self._part), spans_of(batch), torch.empty_like(rows[2]), step)


class XlstmBlock(nn.Module):
    """Pre-norm residuals."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.norm_mlstm, self.norm_ffn = make_norm(config, build), make_norm(config, build)
        self.mlstm_layer = MatrixMemory(config, build, layer)
        self.ffn = GatedMLP(build, config.hidden_size, config.intermediate_size, "silu")

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        if isinstance(x_TD, TracedTensor):
            recurrent(x_TD)  # without states the model runs as a whole
        h_TD, stream_TD = self.norm_mlstm(x_TD, residual_TD)
        h_TD, stream_TD = self.norm_ffn(self.mlstm_layer(h_TD, batch), stream_TD)
        return self.ffn(h_TD), stream_TD


class Xlstm(Decoder):
    """Its names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("embeddings",),
        "layers": ("blocks",),
        "gate_up_proj": ("proj_up_gate", "proj_up"),
        "down_proj": ("proj_down",),
        "norm": ("out_norm",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return XlstmBlock(config, build, layer)


MODEL = Xlstm
