"""RWKV-5 and RWKV-6: each head keeps a matrix that decays per row (arXiv:2404.05892).

In RWKV-6 decay and token shift depend on the row. Names as in the checkpoints that come with code
for transformers. As there, the newest token has a separate weight. Weights of the last layers are
not halved (`rescale_every`), because the residual stream is float32.

Shapes: T rows, D hidden, H heads, N columns of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, X
from sylvan.kernels.recurrent import Columns, GateRule, Wkv6Layer, Wkv6Rows, recurrent
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
from sylvan.runtime.models.rwkv import Shift
from sylvan.runtime.models.rwkv7 import HeadGroupNorm

Raw = dict[str, Any]

_PARTS = 3  # states of a layer: previous rows of both halves, and the matrices
_NORM_EPS = 1e-5  # of head norms; independent of the model's epsilon
_WIDE = 4096  # from this hidden size on, low-rank matrices have twice the rank
_MIXED = ("w", "k", "v", "r", "g")


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `Rwkv5ForCausalLM` and `Rwkv6ForCausalLM`.

    Raises:
        ConfigError: sizes are missing or impossible.
    """
    layers, width = (_size(raw, name) for name in ("num_hidden_layers", "hidden_size"))
    columns, inner = _size(raw, "head_size", 64), raw.get("attention_hidden_size") or width
    if inner != width or width % columns:
        raise ConfigError(
            f"config.json: heads of {columns} columns must divide hidden_size {width}, and "
            f"attention_hidden_size must be the same; it is {inner}"
        )
    positions = raw.get("max_position_embeddings") or raw.get("max_context_length")
    parts = ((2, width), False), ((width // columns, columns, columns), True), ((2, width), False)
    sizes = {
        "architecture": architecture_of(raw),
        "vocab_size": raw.get("vocab_size", 65536),
        "hidden_size": width,
        "intermediate_size": raw.get("intermediate_size") or int(width * 3.5) // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": positions or 4096,
        "rope": RopeParams(),
        "norm": "layer",
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    return make_config(plain_fields(raw) | split_layers(["rwkv"] * layers, parts) | sizes)


def _size(raw: Raw, name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, it is {value!r}")
    return value


class DecayTimeMix(Recurrent):
    """Time mixing, in place of attention, with constant decay: RWKV-5."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, part = config.hidden_size, _PARTS * layer
        heads, columns, _ = config.states[part + 1].shape
        self.state_shapes = {part + 1: (heads, columns, columns)}
        self._part, self._columns, self.shift = part, columns, Shift(build, dim, part)
        for letter in _MIXED[1:]:
            setattr(self, f"time_maa_{letter}", build.empty(dim))
        self.time_decay, self.time_faaaa = build.empty(dim), build.empty(dim)
        self.receptance, self.key, self.value, self.gate, self.output = (
            Linear(build, dim, (dim,), bias=False) for _ in range(5)
        )
        eps = _NORM_EPS * config.raw.get("head_size_divisor", 8) ** 2
        self.ln_x = HeadGroupNorm(build, dim, heads, eps)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.output(self._traced(x_TD))
        assert isinstance(x_TD, torch.Tensor)
        change_TD = self.shift(x_TD, batch) - x_TD
        shares = self.shares(x_TD, change_TD)
        given = {name: x_TD + change_TD * share for name, share in shares.items()}
        fade_THN = self._heads(torch.exp(-torch.exp(self.decay(given, x_TD))))
        named = ("k", self.key), ("v", self.value), ("r", self.receptance)
        key, value, query = (self._heads(made(given[name]).float()) for name, made in named)
        first_HN = self.time_faaaa.float().view(key.shape[1:])

        def step(held: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            now = key[at][..., None] * value[at][..., None, :]
            seen = held + first_HN[..., None] * now
            return held * fade_THN[at][..., None] + now, (query[at][..., None] * seen).sum(-2)

        state = state_of(batch, self._part + 1)
        found = scan(state, spans_of(batch), torch.empty_like(value), step)
        opened = F.silu(self.gate(given["g"]))
        return self.output(self.ln_x(found.flatten(1)).to(x_TD.dtype) * opened)

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        given, decay = self.traced_inputs(x, self.shift.traced(x))
        tracer, heads = recurrent(x), x.cols // self._columns
        rows = Wkv6Rows(
            query=self.receptance(given["r"]),
            key=self.key(given["k"]),
            value=self.value(given["v"]),
            decay=decay,
        )
        layer = Wkv6Layer(
            part=self._part + 1,
            heads=heads,
            time_decay=self.time_decay if decay is None else None,
            time_first=self.time_faaaa,
        )
        rule = GateRule(
            function="silu",
            norm="layer",
            weight=self.ln_x.weight,
            bias=self.ln_x.bias,
            parts=heads,
            eps=self.ln_x.eps,
        )
        return tracer.gate(tracer.wkv6(rows, layer), Columns(self.gate(given["g"])), rule)

    def traced_inputs(
        self, x: TracedTensor, before: TracedTensor
    ) -> tuple[dict[str, TracedTensor], TracedTensor | None]:
        """Inputs of the projections, and logarithms of decays if rows have their own."""
        mix = recurrent(x).mix
        shares = {letter: getattr(self, f"time_maa_{letter}") for letter in _MIXED[1:]}
        return {letter: mix(x, before, share) for letter, share in shares.items()}, None

    def shares(self, x_TD: torch.Tensor, change_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Token-shift weights of the projections."""
        return {letter: getattr(self, f"time_maa_{letter}") for letter in _MIXED[1:]}

    def decay(self, given: Mapping[str, torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
        """Logarithm of the decay. Shape: float32 (T, D)."""
        return self.time_decay.float().expand(len(x_TD), -1)

    def _heads(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.unflatten(-1, (-1, self._columns))


class DynamicTimeMix(DecayTimeMix):
    """Time mixing whose token shift and decay depend on the row: RWKV-6."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__(config, build, layer)
        dim, times = config.hidden_size, 2 if config.hidden_size == _WIDE else 1
        self.time_maa_x, self.time_maa_w = build.empty(dim), build.empty(dim)
        # Stored inputs first; see `Rwkv6.convert`.
        self.time_maa_w1 = build.empty(len(_MIXED) * 32 * times, dim)
        self.time_maa_w2 = build.empty(len(_MIXED), dim, 32 * times)
        self.time_decay_w1 = build.empty(64 * times, dim)
        self.time_decay_w2 = build.empty(dim, 64 * times)

    def shares(self, x_TD: torch.Tensor, change_TD: torch.Tensor) -> dict[str, torch.Tensor]:
        mixed_TD = x_TD + change_TD * self.time_maa_x
        low = ops.linear(mixed_TD, self.time_maa_w1).tanh().chunk(len(_MIXED), -1)
        return {
            letter: getattr(self, f"time_maa_{letter}")
            + ops.linear(low[place].contiguous(), self.time_maa_w2[place])
            for place, letter in enumerate(_MIXED)
        }

    def traced_inputs(
        self, x: TracedTensor, before: TracedTensor
    ) -> tuple[dict[str, TracedTensor], TracedTensor | None]:
        """See `DecayTimeMix`."""
        tracer = recurrent(x)
        low = ops.linear(tracer.mix(x, before, self.time_maa_x), self.time_maa_w1)
        added = tracer.linear_heads(ops.activation(low, "tanh"), self.time_maa_w2)
        given = {
            letter: tracer.mix(
                x,
                before,
                getattr(self, f"time_maa_{letter}"),
                row_share=Columns(added, place * x.cols),
            )
            for place, letter in enumerate(_MIXED)
        }
        low = ops.activation(ops.linear(given["w"], self.time_decay_w1), "tanh")
        return given, ops.linear(low, self.time_decay_w2, self.time_decay, out_f32=True)

    def decay(self, given: Mapping[str, torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
        low = ops.linear(given["w"], self.time_decay_w1).tanh()
        return self.time_decay.float() + ops.linear(low, self.time_decay_w2, out_f32=True)


class ShiftedChannelMix(nn.Module):
    """Channel mixing, in place of an MLP."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.intermediate_size
        self.shift = Shift(build, dim, _PARTS * layer + 2)
        self.time_maa_k, self.time_maa_r = build.empty(dim), build.empty(dim)
        self.key = Linear(build, dim, (inner,), bias=False)
        self.receptance = Linear(build, dim, (dim,), bias=False)
        self.value = Linear(build, inner, (dim,), bias=False)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self._traced(x_TD)
        assert isinstance(x_TD, torch.Tensor)
        change_TD = self.shift(x_TD, batch) - x_TD
        inner = self.key(x_TD + change_TD * self.time_maa_k).relu().square()
        return self.receptance(x_TD + change_TD * self.time_maa_r).sigmoid() * self.value(inner)

    def _traced(self, x: TracedTensor) -> TracedTensor:
        before, tracer = self.shift.traced(x), recurrent(x)
        shares = self.time_maa_k, self.time_maa_r
        key, receptance = (tracer.mix(x, before, share) for share in shares)
        value = self.value(ops.activation(self.key(key), "relu2"))
        opened = Columns(self.receptance(receptance))
        return tracer.gate(value, opened, GateRule(function="sigmoid"))


class DecayBlock(nn.Module):
    """Pre-norm residuals; the first layer norms the embeddings, too."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.pre_ln = None if layer else LayerNorm(build, dim, eps)
        self.ln1, self.ln2 = LayerNorm(build, dim, eps), LayerNorm(build, dim, eps)
        dynamic = config.architecture == "Rwkv6ForCausalLM"
        self.attention = (DynamicTimeMix if dynamic else DecayTimeMix)(config, build, layer)
        self.feed_forward = ShiftedChannelMix(config, build, layer)

    def forward(self, x_TD: X, residual_TD: X | None, batch: ForwardBatch) -> tuple[X, X]:
        if isinstance(x_TD, TracedTensor):
            recurrent(x_TD)  # without states the model runs as a whole
        if self.pre_ln is not None:
            x_TD = self.pre_ln(x_TD)[0]
        h_TD, stream_TD = self.ln1(x_TD, residual_TD)
        h_TD, stream_TD = self.ln2(self.attention(h_TD, batch), stream_TD)
        return self.feed_forward(h_TD, batch), stream_TD


class Rwkv6(Decoder):
    """Maps the tensor names of the checkpoint."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "embed_tokens": ("embeddings",),
        "layers": ("blocks",),
        "norm": ("ln_out",),
        "lm_head": ("head",),
    }

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return DecayBlock(config, build, layer)

    def rename(self, name: str) -> str:
        """Strip the prefix from a tensor name of the checkpoint."""
        return name.removeprefix("rwkv.")

    def source_name(self, source: str) -> str:
        """Map names; RWKV-5 stores weights of the row itself, under longer names."""
        if self.config.architecture == "Rwkv6ForCausalLM":
            return source
        for letter, word in zip("kvrg", ("key", "value", "receptance", "gate"), strict=True):
            source = source.replace(f".time_maa_{letter}", f".time_mix_{word}")
        return source

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Flatten vectors, and transpose small matrices, which are stored inputs first."""
        if name.endswith(("_w1", "_w2")):
            return tensor.transpose(-1, -2)
        if ".time_mix_" in name:
            return 1 - tensor.float().flatten()
        return tensor.flatten() if ".time_" in name else tensor


MODEL = Rwkv6
