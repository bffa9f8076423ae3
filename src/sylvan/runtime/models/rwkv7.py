"""RWKV-7: each head keeps a matrix that decays by column and replaces the value of a key.

Source: arXiv:2503.14456; names as in checkpoints of flash-linear-attention.

Shapes: T rows, D hidden, H heads, N columns of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import ActivationKind, TracedTensor, X
from sylvan.kernels.recurrent import Wkv7Layer, Wkv7Rows, recurrent
from sylvan.kernels.scan.spans import scan
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.layers.recurrent import Recurrent, spans_of, state_of
from sylvan.runtime.models.config import (
    ModelConfig,
    NotNative,
    architecture_of,
    make_config,
    plain_fields,
)
from sylvan.runtime.models.decoder import Decoder, Ropes
from sylvan.runtime.models.hybrid import split_layers
from sylvan.runtime.models.rope import RopeParams
from sylvan.runtime.models.rwkv import Shift

Raw = dict[str, Any]

_PARTS = 3  # states of a layer: previous rows of both halves, and the matrices
_SLOWEST = -math.exp(-0.5)  # bound of the logarithm of decay
_RANKS = {
    "w_lora": ("decay_low_rank_dim", 64),
    "a_lora": ("a_low_rank_dim", 64),
    "v_lora": ("v_low_rank_dim", 16),
    "g_lora": ("gate_low_rank_dim", 128),
}
_MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
_STORED_WIDE = frozenset({*_MIXES, "r_k"})


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `RWKV7ForCausalLM`.

    Raises:
        ConfigError: sizes are missing or impossible.
        NotNative: It has attention layers, values wider than keys, or another activation.
    """
    layers, width = (_size(raw, name) for name in ("num_hidden_layers", "hidden_size"))
    columns = _size(raw, "head_dim", 64)
    if width % columns:
        raise ConfigError(f"config.json: head_dim {columns} does not divide hidden_size {width}")
    values = raw.get("value_dim")
    if raw.get("attn") or (values is not None and values not in (width, [width] * layers)):
        raise NotNative("layers that attend, or values wider than keys")
    if raw.get("hidden_act", "sqrelu") != "sqrelu" or raw.get("norm_first") is False:
        raise NotNative("another activation, or embeddings without a norm")
    for name, default in _RANKS.values():
        _size(raw, name, default)
    inner = raw.get("intermediate_size")
    parts = ((2, width), False), ((width // columns, columns, columns), True), ((2, width), False)
    sizes = {
        "architecture": architecture_of(raw),
        "vocab_size": raw.get("vocab_size"),
        "hidden_size": width,
        "intermediate_size": inner or -(-int(width * (raw.get("hidden_ratio") or 4)) // 32) * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "rope": RopeParams(),
        "norm": "layer",
        "norm_bias": raw.get("norm_bias", True) is not False,
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    return make_config(plain_fields(raw) | split_layers(["rwkv"] * layers, parts) | sizes)


def _size(raw: Raw, name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, it is {value!r}")
    return value


_TRACED: Mapping[type[nn.Module], ActivationKind] = MappingProxyType(
    {nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
)


class LowRankPair(nn.Module):
    """A low-rank mlp: two matrices with an activation between. Shape: (T, D) -> (T, D)."""

    def __init__(
        self, config: ModelConfig, build: Build, name: str, act: nn.Module, *, bias: bool = True
    ) -> None:
        super().__init__()
        dim, rank = config.hidden_size, _size(config.raw, *_RANKS[name])
        self.lora = nn.Sequential(
            Linear(build, dim, (rank,), bias=False), act, Linear(build, rank, (dim,), bias=bias)
        )

    def forward(self, x_TD: X) -> X:
        if not isinstance(x_TD, TracedTensor):
            return self.lora(x_TD)
        into, act, out = self.lora
        low = into(x_TD)
        kind = _TRACED.get(type(act))
        return out(low if kind is None else ops.activation(low, kind))


class HeadGroupNorm(nn.Module):
    """A norm of each head by itself, with mean and variance removed. Shape: (T, D) -> (T, D)."""

    def __init__(self, build: Build, dim: int, heads: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = build.empty(dim), build.empty(dim)
        self._heads, self.eps = heads, eps

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.group_norm(x_TD, self._heads, weight, bias, self.eps)


@dataclass(slots=True)
class FirstValues:
    """Values of a step's first layer, which later layers mix with their own. Shape: (T, D)."""

    values: torch.Tensor | TracedTensor | None = None


class MatrixTimeMix(Recurrent):
    """Time mixing: the matrices, in place of attention."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, part = config.hidden_size, _PARTS * layer
        heads, columns, _ = config.states[part + 1].shape
        self.state_shapes = {part + 1: (heads, columns, columns)}
        self.first = FirstValues()  # of the model; see `Rwkv7`
        self._part, self._columns, self.shift = part, columns, Shift(build, dim, part)
        for name in _MIXES:
            setattr(self, name, build.empty(dim))
        self.k_k, self.k_a, self.r_k = (build.empty(dim) for _ in range(3))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (
            Linear(build, dim, (dim,), bias=False) for _ in range(4)
        )
        self.w_lora = LowRankPair(config, build, "w_lora", nn.Tanh())
        self.a_lora = LowRankPair(config, build, "a_lora", nn.Identity())
        self.g_lora = LowRankPair(config, build, "g_lora", nn.Sigmoid(), bias=False)
        self.v_lora = LowRankPair(config, build, "v_lora", nn.Identity()) if layer else None
        self.g_norm = HeadGroupNorm(build, dim, heads, columns * config.rms_norm_eps)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.o_proj(self._traced(x_TD))
        assert isinstance(x_TD, torch.Tensor)
        change_TD = self.shift(x_TD, batch) - x_TD
        r, w, k, v, a, g = (x_TD + change_TD * getattr(self, name) for name in _MIXES)
        values_TD = self.v_proj(v)
        if self.v_lora is None:
            self.first.values = values_TD
        else:
            assert isinstance(self.first.values, torch.Tensor)
            own = self.v_lora(v).sigmoid()
            values_TD = values_TD + (self.first.values - values_TD) * own
        rate_TD, keys_TD = self.a_lora(a).float().sigmoid(), self.k_proj(k).float()
        removed_THN = F.normalize(self._heads(keys_TD * self.k_k.float()), dim=-1)
        keys_THN = self._heads(keys_TD * (1 + (rate_TD - 1) * self.k_a.float()))
        r_THN, v_THN = self._heads(self.r_proj(r).float()), self._heads(values_TD.float())
        decay_THN = self._heads((_SLOWEST * self.w_lora(w).float().sigmoid()).exp())
        rows = decay_THN, removed_THN, removed_THN * self._heads(rate_TD), keys_THN, v_THN, r_THN
        out_TD = self.g_norm(self._recalled(rows, batch).flatten(1))
        direct_THN = r_THN * keys_THN * self.r_k.float().view(keys_THN.shape[1:])
        direct_TH1 = direct_THN.sum(-1, keepdim=True)
        out_TD = out_TD + (direct_TH1 * v_THN).flatten(1)
        return self.o_proj(out_TD.to(x_TD.dtype) * self.g_lora(g))

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        tracer, before = recurrent(x), self.shift.traced(x)
        r, w, k, v, a, g = (tracer.mix(x, before, getattr(self, name)) for name in _MIXES)
        values = self.v_proj(v)
        if self.v_lora is None:
            self.first.values = values
        else:
            assert isinstance(self.first.values, TracedTensor)
            values = tracer.mix(values, self.first.values, self.v_lora(v))
        rows = Wkv7Rows(
            query=self.r_proj(r),
            decay=self.w_lora(w),
            key=self.k_proj(k),
            value=values,
            rate=self.a_lora(a),
            gate=self.g_lora(g),
        )
        layer = Wkv7Layer(
            part=self._part + 1,
            heads=x.cols // self._columns,
            k_k=self.k_k,
            k_a=self.k_a,
            r_k=self.r_k,
            norm=(self.g_norm.weight, self.g_norm.bias),
            eps=self.g_norm.eps,
        )
        return tracer.wkv7(rows, layer)

    def _heads(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.unflatten(-1, (-1, self._columns))

    def _recalled(self, rows_THN: tuple[torch.Tensor, ...], batch: ForwardBatch) -> torch.Tensor:
        """Query the matrices: float32 (T, H, N); matrix rows are keys, columns are values.

        `rows_THN`: decay, removed key, removed key times rate, key, value and query.
        """

        def step(held: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            decay, removed, rated, key, value, query = (x[at][..., None] for x in rows_THN)
            known = (removed * held).sum(-2, keepdim=True)
            new = held * decay - rated * known + key * value.transpose(-1, -2)
            return new, (query * new).sum(-2)

        state = state_of(batch, self._part + 1)
        return scan(state, spans_of(batch), torch.empty_like(rows_THN[0]), step)


class SquaredChannelMix(nn.Module):
    """Channel mixing, in place of the mlp."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.intermediate_size
        self.shift, self.x_k = Shift(build, dim, _PARTS * layer + 2), build.empty(dim)
        self.key = Linear(build, dim, (inner,), bias=False)
        self.value = Linear(build, inner, (dim,), bias=False)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            mixed = recurrent(x_TD).mix(x_TD, self.shift.traced(x_TD), self.x_k)
            return self.value(ops.activation(self.key(mixed), "relu2"))
        assert isinstance(x_TD, torch.Tensor)
        mixed_TD = x_TD + (self.shift(x_TD, batch) - x_TD) * self.x_k
        return self.value(self.key(mixed_TD).relu().square())


class Rwkv7Block(nn.Module):
    """Pre-norm residuals; the first layer norms the embeddings, too."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.pre_norm = None if layer else _norm(config, build)
        self.attn_norm, self.ffn_norm = _norm(config, build), _norm(config, build)
        self.attn = MatrixTimeMix(config, build, layer)
        self.ffn = SquaredChannelMix(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        if isinstance(x_TD, TracedTensor):
            recurrent(x_TD)  # without states the model runs as a whole
        if self.pre_norm is not None:
            x_TD = self.pre_norm(x_TD)[0]
        h_TD, stream_TD = self.attn_norm(x_TD, residual_TD)
        h_TD, stream_TD = self.ffn_norm(self.attn(h_TD, batch), stream_TD)
        return self.ffn(h_TD, batch), stream_TD


def _norm(config: ModelConfig, build: Build) -> LayerNorm:
    return LayerNorm(build, config.hidden_size, config.rms_norm_eps, bias=config.norm_bias)


class Rwkv7(Decoder):
    """Its names."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {"embed_tokens": ("embeddings",)}

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Rwkv7Block(config, build, layer)

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        first = FirstValues()
        for block in self.layers:
            assert isinstance(block, Rwkv7Block)
            block.attn.first = first

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Some vectors are stored with more dimensions."""
        wide = name.rpartition(".")[2] in _STORED_WIDE
        return tensor.flatten() if wide and tensor.dim() > 1 else tensor


MODEL = Rwkv7
