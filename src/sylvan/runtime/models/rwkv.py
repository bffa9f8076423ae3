"""RWKV-4: each channel keeps a weighted mean of earlier values (arXiv:2305.13048).

Transformers halves weights of the last layers for float16 (`rescale_every`); Sylvan instead keeps
the residual stream in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.recurrent import Columns, ConvLayer, GateRule, WkvLayer, recurrent
from sylvan.kernels.scan.spans import scan
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm
from sylvan.runtime.layers.recurrent import Recurrent, spans_of, state_of
from sylvan.runtime.models.config import (
    ModelConfig,
    architecture_of,
    make_config,
    plain_fields,
)
from sylvan.runtime.models.decoder import Decoder, Ropes
from sylvan.runtime.models.hybrid import split_layers
from sylvan.runtime.models.rope import RopeParams

Raw = dict[str, Any]

_PARTS = 3  # states of a layer: previous rows of both halves, and the mean
_NOTHING = -1e38  # exponent of an empty mean


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `RwkvForCausalLM`."""
    layers, width = raw.get("num_hidden_layers"), raw.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(width, int):
        raise ConfigError("config.json: num_hidden_layers and hidden_size must be integers")
    inner = raw.get("attention_hidden_size") or width
    parts = ((2, width), False), ((3, inner), True), ((2, width), False)
    sizes = {
        "architecture": architecture_of(raw),
        "vocab_size": raw.get("vocab_size"),
        "hidden_size": width,
        "intermediate_size": raw.get("intermediate_size") or 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": raw.get("context_length", 1024),
        "rope": RopeParams(),
        "norm": "layer",
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    return make_config(plain_fields(raw) | split_layers(["rwkv"] * layers, parts) | sizes)


class Shift(Recurrent):
    """The previous row of each row; zeros for the first. Shape: (T, D) -> (T, D)."""

    def __init__(self, build: Build, dim: int, part: int) -> None:
        super().__init__()
        self.state_shapes = {part: (2, dim)}
        taps = torch.tensor([[1.0, 0.0]], dtype=build.dtype, device=build.device)
        self._part, self._taps = part, taps.repeat(dim, 1)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """A causal convolution."""
        state, spans = state_of(batch, self._part), spans_of(batch)
        return self.scans.conv(x_TD, self._taps, None, state, spans).to(x_TD.dtype)

    def traced(self, x: TracedTensor) -> TracedTensor:
        """The same in a program."""
        layer = ConvLayer(part=self._part, weight=self._taps, bias=None)
        return recurrent(x).conv(Columns(x), layer)


def _mixed(x_TD: torch.Tensor, before_TD: torch.Tensor, share_D: torch.Tensor) -> torch.Tensor:
    return x_TD * share_D + before_TD * (1 - share_D)


class TimeMix(Recurrent):
    """Time mixing: the weighted mean, in place of attention."""

    def __init__(self, config: ModelConfig, build: Build, part: int) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.states[part + 1].shape[1]
        self.state_shapes = {part + 1: (3, inner)}
        self._part, self.shift = part, Shift(build, dim, part)
        self.time_decay, self.time_first = build.empty(inner), build.empty(inner)
        self.time_mix_key, self.time_mix_value = build.empty(dim), build.empty(dim)
        self.time_mix_receptance = build.empty(dim)
        self.key, self.value, self.receptance = (
            Linear(build, dim, (inner,), bias=False) for _ in range(3)
        )
        self.output = Linear(build, inner, (dim,), bias=False)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.output(self._traced(x_TD))
        assert isinstance(x_TD, torch.Tensor)
        before = self.shift(x_TD, batch)
        key = self.key(_mixed(x_TD, before, self.time_mix_key)).float()
        value = self.value(_mixed(x_TD, before, self.time_mix_value)).float()
        opened = self.receptance(_mixed(x_TD, before, self.time_mix_receptance)).sigmoid()
        decay, first = -self.time_decay.float().exp(), self.time_first.float()

        def step(held: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight, top = held.unbind(1)
            top = torch.where(weight == 0, _NOTHING, top)
            now, seen = key[rows] + first, value[rows]
            most = torch.maximum(top, now)
            old, new = (top - most).exp(), (now - most).exp()
            out = (old * total + new * seen) / (old * weight + new)
            most = torch.maximum(top + decay, key[rows])
            old, new = (top + decay - most).exp(), (key[rows] - most).exp()
            return torch.stack((old * total + new * seen, old * weight + new, most), 1), out

        state = state_of(batch, self._part + 1)
        mean = scan(state, spans_of(batch), torch.empty_like(key), step)
        return self.output(opened * mean.to(x_TD.dtype))

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        before, tracer = self.shift.traced(x), recurrent(x)
        shares = self.time_mix_key, self.time_mix_value, self.time_mix_receptance
        key, value, receptance = (tracer.mix(x, before, share, sums=True) for share in shares)
        layer = WkvLayer(
            part=self._part + 1, time_decay=self.time_decay, time_first=self.time_first
        )
        return tracer.wkv(self.key(key), self.value(value), self.receptance(receptance), layer)


class ChannelMix(nn.Module):
    """Channel mixing, in place of the mlp."""

    def __init__(self, config: ModelConfig, build: Build, part: int) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.intermediate_size
        self.shift = Shift(build, dim, part + 2)
        self.time_mix_key, self.time_mix_receptance = build.empty(dim), build.empty(dim)
        self.key = Linear(build, dim, (inner,), bias=False)
        self.receptance = Linear(build, dim, (dim,), bias=False)
        self.value = Linear(build, inner, (dim,), bias=False)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self._traced(x_TD)
        assert isinstance(x_TD, torch.Tensor)
        before = self.shift(x_TD, batch)
        key = self.key(_mixed(x_TD, before, self.time_mix_key)).relu().square()
        opened = self.receptance(_mixed(x_TD, before, self.time_mix_receptance)).sigmoid()
        return opened * self.value(key)

    def _traced(self, x: TracedTensor) -> TracedTensor:
        before, tracer = self.shift.traced(x), recurrent(x)
        shares = self.time_mix_key, self.time_mix_receptance
        key, receptance = (tracer.mix(x, before, share, sums=True) for share in shares)
        value = self.value(ops.activation(self.key(key), "relu2"))
        return tracer.gate(
            value, Columns(self.receptance(receptance)), GateRule(function="sigmoid")
        )


class RwkvBlock(nn.Module):
    """Pre-norm residuals; the first layer norms the embeddings, too."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, eps, part = config.hidden_size, config.rms_norm_eps, _PARTS * layer
        self.pre_ln = None if layer else LayerNorm(build, dim, eps)
        self.ln1, self.ln2 = LayerNorm(build, dim, eps), LayerNorm(build, dim, eps)
        self.attention = TimeMix(config, build, part)
        self.feed_forward = ChannelMix(config, build, part)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        if isinstance(x_TD, TracedTensor):
            recurrent(x_TD)  # without states the model runs as a whole
        if self.pre_ln is not None:
            x_TD = self.pre_ln(x_TD)[0]
        h_TD, stream_TD = self.ln1(x_TD, residual_TD)
        h_TD, stream_TD = self.ln2(self.attention(h_TD, batch), stream_TD)
        return self.feed_forward(h_TD, batch), stream_TD


class Rwkv(Decoder):
    """Maps the tensor names of the checkpoint."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("embeddings",),
        "layers": ("blocks",),
        "norm": ("ln_out",),
        "lm_head": ("head",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return RwkvBlock(config, build, layer)

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        return name.removeprefix("rwkv.")

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Mixing weights of the previous row are stored as (1, 1, D)."""
        return tensor.flatten() if ".time_mix_" in name else tensor


MODEL = Rwkv
