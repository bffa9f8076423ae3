"""Zamba: multi-head Mamba layers, some of which share one attention block (arXiv:2405.16712).

The shared block reads the concatenated residual stream and embeddings; its output is added to the
input of a Mamba layer, not to the residual stream. Each layer that uses it has its own KV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, TracedTensor, X
from sylvan.kernels.recurrent import Columns, GateRule, SpaceLayer, recurrent
from sylvan.kernels.scan import SpaceInputs
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, Linear, RowParallel
from sylvan.runtime.layers.mesh import Share, Split
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.layers.recurrent import Conv, MambaShape, Recurrent, scan_spans, state_of
from sylvan.runtime.models.config import ModelConfig, StatePart, common_fields, make_config
from sylvan.runtime.models.decoder import FUSED, Decoder, Ropes, make_norm

Raw = dict[str, Any]

_PARTS = 2  # states of a layer: the convolution's and the scan's


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiHeadMambaShape:
    """A Mamba mixer of `heads` that share only the first and the last projection."""

    mamba: MambaShape
    heads: int


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `ZambaForCausalLM`.

    Raises:
        ConfigError: kinds of layers are missing, or heads do not divide the channels.
    """
    layers, kinds = raw.get("num_hidden_layers") or 0, _kinds(raw)
    if len(kinds) != layers or "hybrid" not in kinds:
        raise ConfigError(
            "config.json: layers_block_type must have an entry per layer, at least one 'hybrid'"
        )
    heads = raw.get("num_attention_heads") or 1
    size = raw.get("attention_head_dim") or 2 * (raw.get("hidden_size") or 1) // heads
    wide = raw.get("attention_hidden_size")
    if wide not in (None, 2 * (raw.get("hidden_size") or 1)):
        raise ConfigError("config.json: attention_hidden_size must be twice hidden_size")
    shape = _shape(raw)
    if shape.heads < 1 or shape.mamba.inner % shape.heads:
        raise ConfigError(
            f"config.json: {shape.heads} Mamba heads must divide {shape.mamba.inner} channels"
        )
    states = [StatePart(part, exact) for part, exact in shape.mamba.parts]
    fields = common_fields({"hidden_act": "gelu"} | raw | {"head_dim": size}) | {
        "attention_layers": tuple(i for i, kind in enumerate(kinds) if kind == "hybrid"),
        "states": tuple(states) * layers,
        "nope_layers": tuple(range(layers)),
        "attention_scale": (size / 2) ** -0.5,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }
    return make_config(fields)


def _kinds(raw: Raw) -> list[str]:
    """The kind of each layer: `hybrid` or `mamba`."""
    given = raw.get("layers_block_type") or raw.get("layer_types")
    if isinstance(given, list):
        return given
    period, offset = raw.get("attn_layer_period", 6), raw.get("attn_layer_offset", 4)
    later = range((raw.get("num_hidden_layers") or 0) - 3)
    rest = ["hybrid" if i % period == offset else "mamba" for i in later]
    return ["mamba", "mamba", "hybrid", *rest]


def _shape(raw: Raw) -> MultiHeadMambaShape:
    hidden, rank = raw.get("hidden_size") or 1, raw.get("mamba_dt_rank", "auto")
    mamba = MambaShape(
        dim=hidden,
        inner=raw.get("mamba_expand", 2) * hidden,
        states=raw.get("mamba_d_state", 16),
        rank=math.ceil(hidden / 16) if rank == "auto" else rank,
        taps=raw.get("mamba_d_conv", 4),
        bias=bool(raw.get("mamba_proj_bias", False)),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
    )
    return MultiHeadMambaShape(mamba=mamba, heads=raw.get("n_mamba_heads", 2))


class MultiHeadMamba(Recurrent):
    """Mamba with separate matrices per head; the same on every rank."""

    scans_only = True

    def __init__(self, build: Build, shape: MultiHeadMambaShape, part: int) -> None:
        super().__init__()
        mamba, heads = shape.mamba, shape.heads
        each, low = mamba.inner // heads, mamba.rank + 2 * mamba.states
        self._shape, self._part = shape, part
        self.state_shapes = {part + 1: mamba.parts[1][0]}
        self.in_proj = Linear(build, mamba.dim, (mamba.inner, mamba.inner), bias=mamba.bias)
        whole = Split(Share(mamba.inner, 0, mamba.inner))
        self.conv1d = Conv(build, whole, mamba.taps, part, bias=mamba.conv_bias, silu=True)
        self.x_proj_weight = build.empty(heads, low, each)
        self.dt_proj_weight = build.empty(heads, each, mamba.rank)
        self.dt_proj_bias, self.D = build.empty(mamba.inner), build.empty(mamba.inner)
        self.A_log = build.empty(mamba.inner, mamba.states)
        self.out_proj = Linear(build, mamba.inner, (mamba.dim,), bias=mamba.bias)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        shape, rows = self._shape.mamba, self.in_proj(x_TD)
        if isinstance(rows, TracedTensor):
            return self.out_proj(self._traced(rows))
        assert isinstance(x_TD, torch.Tensor)
        conv_TI, gate_TI = rows.chunk(2, -1)
        x_TI = self.conv1d(conv_TI.contiguous(), batch)
        sizes = [shape.rank, shape.states, shape.states]
        steps, inputs, outputs = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for head, part in enumerate(x_TI.chunk(self._shape.heads, -1)):
            low = ops.linear(part.contiguous(), self.x_proj_weight[head])
            step, b, c = low.split(sizes, -1)
            steps.append(ops.linear(step.contiguous(), self.dt_proj_weight[head]))
            inputs.append(b)
            outputs.append(c)
        dt_TI = F.softplus(torch.cat(steps, -1).float() + self.dt_proj_bias.float())
        space = SpaceInputs(
            x_TI[..., None],
            dt_TI,
            -self.A_log.float().exp(),
            torch.stack(inputs, 1),
            torch.stack(outputs, 1),
            self.D,
        )
        out_TI1 = self.scans.space(space, state_of(batch, self._part + 1), scan_spans(batch))
        return self.out_proj((out_TI1[..., 0] * F.silu(gate_TI.float())).to(x_TD.dtype))

    def _traced(self, rows: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        shape, heads, tracer = self._shape.mamba, self._shape.heads, recurrent(rows)
        x = self.conv1d.traced(Columns(rows))
        low = tracer.linear_heads(x, self.x_proj_weight)
        width = low.cols // heads

        def of_heads(first: int, count: int) -> TracedTensor:
            starts = range(first, low.cols, width)
            return tracer.take_columns(low, [at + i for at in starts for i in range(count)])

        steps = of_heads(0, shape.rank)
        b, c = (of_heads(shape.rank + i * shape.states, shape.states) for i in range(2))
        layer = SpaceLayer(
            part=self._part + 1,
            width=1,
            decay=self.A_log,
            skip=self.D,
            groups=heads,
            states=shape.states,
            dt_bias=self.dt_proj_bias,
        )
        dt = tracer.linear_heads(steps, self.dt_proj_weight)
        y = tracer.space(Columns(x), Columns(dt), (Columns(b), Columns(c)), layer)
        return tracer.gate(y, Columns(rows, x.cols), GateRule(function="silu"))


class MambaBlock(nn.Module):
    """Pre-norm around a mixer."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, build)
        self.mamba = MultiHeadMamba(build, _shape(config.raw), _PARTS * layer)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """The stream after the layer. Shape: float32 (T, D)."""
        return ops.add(x_TD, self.mixed(x_TD, batch))

    def mixed(self, given_TD: X, batch: ForwardBatch) -> X:
        """Addition of the layer to the stream, computed from `given_TD`. Shape: (T, D)."""
        return self.mamba(self.input_layernorm(given_TD)[0], batch)


class SharedProjections(nn.Module):
    """The matrices around attention."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (share.times(config.head_dim) for share in heads)
        width = 2 * config.hidden_size
        self.qkv_proj = ColumnParallel(build, width, Split(queries, keys, keys))
        self.o_proj = RowParallel(build, queries, config.hidden_size)


class SharedBlock(nn.Module):
    """Attention and mlp over the stream and the embeddings, without residuals.

    Places attend between `qkv` and `output`, each with KV of its own.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        dim = config.hidden_size
        heads = build.mesh.heads(config.num_attention_heads, config.num_key_value_heads)
        self.input_layernorm = RMSNorm(build, 2 * dim, config.rms_norm_eps)
        self.self_attn = SharedProjections(config, build)
        self.pre_ff_layernorm = make_norm(config, build)
        self.feed_forward = GatedMLP(build, dim, config.intermediate_size, config.hidden_act)
        self.layer = AttentionLayer(
            index=0,
            num_heads=heads.queries.size,
            num_kv_heads=heads.keys.size,
            head_dim=config.head_dim,
            scale=config.attention_scale or 1.0,
        )

    def qkv(self, x_TD: X, embedded_TD: X) -> X:
        """Queries, keys and values. Shape: (T, D), (T, D) -> (T, (N + 2 K) H)."""
        if isinstance(x_TD, TracedTensor):
            assert isinstance(embedded_TD, TracedTensor)
            both_TC = recurrent(x_TD).join_columns(x_TD, embedded_TD)
        else:
            assert isinstance(embedded_TD, torch.Tensor)
            both_TC = torch.cat((x_TD, embedded_TD), -1)
        return self.self_attn.qkv_proj(self.input_layernorm(both_TC)[0])

    def output(self, attended: X) -> X:
        """Shape: (T, N H) -> (T, D)."""
        return self.feed_forward(self.pre_ff_layernorm(self.self_attn.o_proj(attended))[0])


class ZambaHybridLayer(nn.Module):
    """A Mamba layer that also reads the output of the shared block."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.shared_transf = SharedBlock(config, build)
        self.attention = PagedAttention(
            replace(self.shared_transf.layer, index=config.kv_index(layer)), None
        )
        self.linear = Linear(build, config.hidden_size, (config.hidden_size,), bias=False)
        self.mamba_decoder = MambaBlock(config, build, layer)

    def forward(self, x_TD: X, embedded_TD: X, batch: ForwardBatch) -> X:
        """Shape: float32 (T, D) -> (T, D)."""
        attended = self.attention(self.shared_transf.qkv(x_TD, embedded_TD), batch)
        found_TD = self.linear(self.shared_transf.output(attended))
        return ops.add(x_TD, self.mamba_decoder.mixed(ops.add(x_TD, found_TD), batch))


class Zamba(Decoder):
    """A decoder of these; the checkpoint stores the shared block in the first hybrid layer."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {**FUSED, "norm": ("final_layernorm",)}

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        first, *others = self._places
        for place in others:
            place.shared_transf = first.shared_transf

    @property
    def _places(self) -> list[ZambaHybridLayer]:
        return [block for block in self.layers if isinstance(block, ZambaHybridLayer)]

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        hybrid = layer in (config.attention_layers or ())
        return (ZambaHybridLayer if hybrid else MambaBlock)(config, build, layer)

    @property
    def unused(self) -> tuple[str, ...]:
        """Copies of the shared block."""
        _, *others = self.config.attention_layers or (0,)
        return (*super().unused, *(f"layers.{layer}.shared_transf." for layer in others))

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Channels and their gates take turns in the checkpoint; vectors are stored by head."""
        if name.endswith(".mamba.A_log"):
            return tensor.flatten(0, -2)
        if name.endswith((".mamba.D", ".mamba.dt_proj_bias")):
            return tensor.flatten()
        if ".mamba.in_proj." not in name:
            return tensor
        return torch.cat((tensor[::2], tensor[1::2]))

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        if isinstance(x_TD, TracedTensor):
            recurrent(x_TD)  # without states the model runs as a whole
        embedded_TD = x_TD
        for block in self.layers:
            if isinstance(block, ZambaHybridLayer):
                x_TD = block(x_TD, embedded_TD, batch)
            else:
                x_TD = block(x_TD, batch)
        return self.norm(x_TD)[0]


MODEL = Zamba
