"""Recurrent mixers: convolutions, Mamba and gated delta nets.

They summarise earlier tokens in a state of fixed size instead of keys and values. Each mixer gets
the index of its first part in the state pool. Parameter names follow the checkpoints, except the
norm before the output, which is always called `norm`.

Shapes: T rows, D hidden, C channels of a convolution, H heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, Unsupported, X
from sylvan.kernels.collective.reference import mean_of_squares
from sylvan.kernels.recurrent import (
    Columns,
    ConvLayer,
    DeltaLayer,
    GateRule,
    SpaceLayer,
    recurrent,
)
from sylvan.kernels.scan import (
    DeltaInputs,
    DeviceSpans,
    Scans,
    SpaceInputs,
    Spans,
    TorchScans,
)
from sylvan.kernels.scan.delta import EPS
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, RowParallel
from sylvan.runtime.layers.mesh import Share, Split
from sylvan.runtime.layers.norm import RMSNorm

Shape = tuple[int, ...]


def spans_of(batch: ForwardBatch) -> Spans:
    """The rows and slots of a step."""
    return batch.spans


def scan_spans(batch: ForwardBatch) -> Spans | DeviceSpans:
    """The rows and slots of a step for `Scans`; device arrays where graphs capture steps."""
    return spans_of(batch) if batch.state_spans is None else batch.state_spans


def state_of(batch: ForwardBatch, part: int) -> torch.Tensor:
    """All slots of one part of the states."""
    assert batch.states is not None
    return batch.states.part(part)


class Recurrent(nn.Module):
    """A layer with recurrent states; `scans` may be set to native kernels.

    Attributes:
        state_shapes: Shapes of its states on this rank, by number in the pool.
        scans_only: Whether only `scans` depend on where requests begin; if so, and the scans are
            device kernels, device graphs can capture its steps.
    """

    state_shapes: Mapping[int, Shape]
    scans_only: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self.scans: Scans = TorchScans()


def use_scans(model: nn.Module, scans: Scans) -> None:
    """Compute all recurrent mixers by these kernels."""
    for module in model.modules():
        if isinstance(module, Recurrent):
            module.scans = scans


def has_scans_only(model: nn.Module) -> bool:
    """Whether all recurrent mixers are `scans_only`."""
    return all(m.scans_only for m in model.modules() if isinstance(m, Recurrent))


def state_shapes(model: nn.Module) -> dict[int, Shape]:
    """Shapes of a model's recurrent states on this rank, by number."""
    found: dict[int, Shape] = {}
    for module in model.modules():
        if isinstance(module, Recurrent):
            found |= module.state_shapes
    return found


class Conv(Recurrent):
    """Causal depthwise convolution; its state is its last inputs.

    `parts` are the channels, on this rank, of the checkpoint tensors joined in it.
    """

    scans_only = True

    def __init__(
        self,
        build: Build,
        channels: Split,
        taps: int,
        part: int,
        *,
        bias: bool,
        silu: bool = False,
    ) -> None:
        super().__init__()
        self.state_shapes, self.parts = {part: (taps, channels.size)}, channels.sizes
        self.weight = build.empty(channels, 1, taps)
        self.bias = build.empty(channels) if bias else None
        self._part, self._silu = part, silu

    def forward(self, x_TC: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shape: (T, C), in the dtype of x."""
        state, spans = state_of(batch, self._part), scan_spans(batch)
        weight = self.weight[:, 0]
        return self.scans.conv(x_TC, weight, self.bias, state, spans, silu=self._silu)

    def traced(self, x: Columns, *, gated: bool = False) -> TracedTensor:
        """`forward` as an op of a traced program; `gated`: see `ConvLayer`."""
        layer = ConvLayer(
            part=self._part, weight=self.weight, bias=self.bias, silu=self._silu, gated=gated
        )
        return recurrent(x.rows).conv(x, layer)


class ShortConv(nn.Module):
    """Gated short convolution (LFM2): C * conv(B * x)."""

    def __init__(self, build: Build, dim: int, taps: int, part: int, *, bias: bool) -> None:
        super().__init__()
        inner = build.mesh.share(dim, "channels of a convolution")
        self.in_proj = ColumnParallel(build, dim, Split(inner, inner, inner), bias=bias)
        self.conv = Conv(build, Split(inner), taps, part, bias=bias)
        self.out_proj = RowParallel(build, inner, dim, bias=bias)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        rows = self.in_proj(x_TD)
        if isinstance(rows, TracedTensor):
            return self.out_proj(self.conv.traced(Columns(rows), gated=True))
        b_TD, c_TD, inner_TD = rows.chunk(3, -1)
        return self.out_proj(c_TD * self.conv(b_TD * inner_TD, batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Shape:
    """Sizes of a Mamba 2 mixer."""

    dim: int
    heads: int
    head_dim: int
    states: int
    groups: int
    taps: int
    eps: float
    bias: bool = False
    conv_bias: bool = True
    norm_groups: int = 1
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.inner + 2 * self.groups * self.states

    @property
    def parts(self) -> tuple[tuple[Shape, bool], tuple[Shape, bool]]:
        """Shapes of the state, and whether it is kept in float32."""
        space = (self.heads, self.head_dim, self.states)
        return ((self.taps, self.channels), False), (space, True)


class Mamba2(Recurrent):
    """State space model with one decay per head (arXiv:2405.21060), gated before the norm."""

    scans_only = True

    def __init__(self, build: Build, shape: Mamba2Shape, part: int) -> None:
        super().__init__()
        heads, groups = build.mesh.heads(shape.heads, shape.groups, "groups of heads")
        norm_groups = shape.norm_groups
        if norm_groups > 1:
            norm_groups = build.mesh.share(norm_groups, "groups of the norm").size
        mine = replace(shape, heads=heads.size, groups=groups.size, norm_groups=norm_groups)
        self._shape, self._part = mine, part
        self.state_shapes = {part + 1: mine.parts[1][0]}
        inner, low = heads.times(shape.head_dim), groups.times(shape.states)
        outputs = Split(inner, inner, low, low, heads)
        self.in_proj = ColumnParallel(build, shape.dim, outputs, bias=shape.bias)
        conv = Split(inner, low, low), shape.taps, part
        self.conv1d = Conv(build, *conv, bias=shape.conv_bias, silu=True)
        self.dt_bias, self.A_log, self.D = (build.empty(Split(heads)) for _ in range(3))
        self.gate_norm = RMSNorm(build, Split(inner), shape.eps)
        self._norm_over = build.mesh.over(Split(inner)) if shape.norm_groups == 1 else None
        self.out_proj = RowParallel(build, inner, shape.dim, bias=shape.bias)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        shape, rows = self._shape, self.in_proj(x_TD)
        if isinstance(rows, TracedTensor):
            return self.out_proj(self._traced(rows))
        assert isinstance(x_TD, torch.Tensor)
        sizes = [shape.inner, shape.channels, shape.heads]
        gate_TI, conv_TC, dt_TH = rows.split(sizes, -1)
        mixed_TC = self.conv1d(conv_TC, batch)
        inner, low = shape.inner, shape.groups * shape.states
        x_TI, b_TG, c_TG = mixed_TC.split([inner, low, low], -1)
        dt_TH = F.softplus(dt_TH.float() + self.dt_bias.float()).clamp(*shape.dt_limit)
        inputs = SpaceInputs(
            x_TI.unflatten(1, (shape.heads, -1)),
            dt_TH,
            -self.A_log.float().exp(),
            b_TG.unflatten(1, (shape.groups, -1)),
            c_TG.unflatten(1, (shape.groups, -1)),
            self.D,
        )
        out_THP = self.scans.space(inputs, state_of(batch, self._part + 1), scan_spans(batch))
        out_TI = out_THP.flatten(1) * F.silu(gate_TI.float())
        grouped = out_TI.unflatten(1, (shape.norm_groups, -1))
        variance = mean_of_squares(grouped, self._norm_over)
        normed_TI = (grouped * torch.rsqrt(variance + shape.eps)).flatten(1).to(x_TD.dtype)
        return self.out_proj(self.gate_norm.weight * normed_TI)

    def _traced(self, rows: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        if self._norm_over is not None:
            raise Unsupported("norms of rows that ranks share, after a gate")
        shape, tracer = self._shape, recurrent(rows)
        inner, low = shape.inner, shape.groups * shape.states
        mixed = self.conv1d.traced(Columns(rows, inner))
        layer = SpaceLayer(
            part=self._part + 1,
            width=shape.head_dim,
            decay=self.A_log,
            skip=self.D,
            groups=shape.groups,
            states=shape.states,
            dt_bias=self.dt_bias,
            dt_limit=shape.dt_limit,
        )
        bc = Columns(mixed, inner), Columns(mixed, inner + low)
        y = tracer.space(Columns(mixed), Columns(rows, inner + shape.channels), bc, layer)
        rule = GateRule(
            function="silu",
            norm="after",
            weight=self.gate_norm.weight,
            parts=shape.norm_groups,
            eps=shape.eps,
        )
        return tracer.gate(y, Columns(rows), rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaShape:
    """Sizes of a Mamba mixer. `norms`: norms of dt, B and C; "free" ones have no weights."""

    dim: int
    inner: int
    states: int
    rank: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    norms: str = ""
    eps: float = 1e-6

    @property
    def parts(self) -> tuple[tuple[Shape, bool], tuple[Shape, bool]]:
        """Shapes of the state, and whether it is kept in float32."""
        return ((self.taps, self.inner), False), ((self.inner, 1, self.states), True)


class Mamba(Recurrent):
    """Selective state space model with a decay per channel (arXiv:2312.00752)."""

    scans_only = True

    def __init__(self, build: Build, shape: MambaShape, part: int) -> None:
        super().__init__()
        self._shape, self._part = shape, part
        inner = build.mesh.share(shape.inner, "channels of a convolution")
        mine = Split(inner)
        self.state_shapes = {part + 1: replace(shape, inner=inner.size).parts[1][0]}
        self.in_proj = ColumnParallel(build, shape.dim, Split(inner, inner), bias=shape.bias)
        self.conv1d = Conv(build, mine, shape.taps, part, bias=shape.conv_bias, silu=True)
        self.x_proj = RowParallel(build, inner, shape.rank + 2 * shape.states)
        self.dt_proj = ColumnParallel(build, shape.rank, mine, bias=True)
        self.A_log = build.empty(mine, shape.states)
        self.D = build.empty(mine)
        if shape.norms == "weighted":
            self.dt_layernorm = RMSNorm(build, shape.rank, shape.eps)
            self.b_layernorm = RMSNorm(build, shape.states, shape.eps)
            self.c_layernorm = RMSNorm(build, shape.states, shape.eps)
        self.out_proj = RowParallel(build, inner, shape.dim, bias=shape.bias)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        shape, rows = self._shape, self.in_proj(x_TD)
        if isinstance(rows, TracedTensor):
            return self.out_proj(self._traced(rows))
        assert isinstance(x_TD, torch.Tensor)
        conv_TI, gate_TI = rows.chunk(2, -1)
        x_TI = self.conv1d(conv_TI, batch)
        sizes = [shape.rank, shape.states, shape.states]
        dt, b, c = self._normed(*self.x_proj(x_TI).split(sizes, -1))
        inputs = SpaceInputs(
            x_TI[..., None],
            F.softplus(self.dt_proj(dt).float()),
            -self.A_log.float().exp(),
            b[:, None],
            c[:, None],
            self.D,
        )
        state, spans = state_of(batch, self._part + 1), scan_spans(batch)
        out_TI = self.scans.space(inputs, state, spans)[..., 0]
        return self.out_proj((out_TI * F.silu(gate_TI.float())).to(x_TD.dtype))

    def _traced(self, rows: TracedTensor) -> TracedTensor:
        """Input of the last projection."""
        shape, tracer = self._shape, recurrent(rows)
        x = self.conv1d.traced(Columns(rows))
        low, rank = self.x_proj(x), shape.rank
        dt = tracer.take_columns(low, range(rank))
        b, c = Columns(low, rank), Columns(low, rank + shape.states)
        if shape.norms:
            b, c = (
                Columns(tracer.take_columns(low, range(part.first, part.first + shape.states)))
                for part in (b, c)
            )
            dt, b_rows, c_rows = self._normed_traced(dt, b.rows, c.rows)
            b, c = Columns(b_rows), Columns(c_rows)
        layer = SpaceLayer(
            part=self._part + 1,
            width=1,
            decay=self.A_log,
            skip=self.D,
            groups=1,
            states=shape.states,
        )
        y = tracer.space(Columns(x), Columns(self.dt_proj(dt)), (b, c), layer)
        return tracer.gate(y, Columns(rows, x.cols), GateRule(function="silu"))

    def _normed_traced(self, *parts: TracedTensor) -> list[TracedTensor]:
        if self._shape.norms == "weighted":
            norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
            return [norm(part)[0] for norm, part in zip(norms, parts, strict=True)]
        ones = [torch.ones(part.cols) for part in parts]
        eps = self._shape.eps
        return [ops.rms_norm(x, one, eps)[0] for x, one in zip(parts, ones, strict=True)]

    def _normed(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._shape.norms == "weighted":
            norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
            return tuple(norm(part)[0].to(part) for norm, part in zip(norms, parts, strict=True))
        if self._shape.norms == "free":
            return tuple(
                F.rms_norm(part.float(), part.shape[-1:], eps=self._shape.eps).to(part)
                for part in parts
            )
        return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Sizes of a gated delta net."""

    dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.value_heads * self.value_dim

    @property
    def parts(self) -> tuple[tuple[Shape, bool], tuple[Shape, bool]]:
        """Shapes of the state, and whether it is kept in float32."""
        memory = (self.value_heads, self.key_dim, self.value_dim)
        return ((self.taps, 2 * self.keys + self.values), False), (memory, True)


class _DeltaShares(NamedTuple):
    """This rank's heads of a gated delta net, and their columns."""

    key_heads: Share
    value_heads: Share
    keys: Share
    values: Share


class _TracedInputs(NamedTuple):
    """Columns of the rows that a gated delta net reads; `mixed` goes through its convolution."""

    mixed: TracedTensor
    z: Columns
    beta: Columns
    decay: Columns


class GatedDelta(Recurrent):
    """Gated delta net (arXiv:2412.06464) of Qwen3-Next: inputs grouped by key heads."""

    scans_only = True

    def __init__(self, build: Build, shape: DeltaShape, part: int) -> None:
        super().__init__()
        key_heads = build.mesh.share(shape.key_heads, "linear_num_key_heads")
        value_heads = build.mesh.share(shape.value_heads, "linear_num_value_heads")
        mine = replace(shape, key_heads=key_heads.size, value_heads=value_heads.size)
        self._shape, self._part = mine, part
        self.state_shapes = {part + 1: mine.parts[1][0]}
        keys, values = key_heads.times(shape.key_dim), value_heads.times(shape.value_dim)
        self._project(build, shape, _DeltaShares(key_heads, value_heads, keys, values))
        conv = Split(keys, keys, values), shape.taps, part
        self.conv1d = Conv(build, *conv, bias=False, silu=True)
        self.dt_bias, self.A_log = (build.empty(Split(value_heads)) for _ in range(2))
        self.gate_norm = RMSNorm(build, shape.value_dim, shape.eps)
        self.out_proj = RowParallel(build, values, shape.dim)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            return self.out_proj(self._traced(self._traced_inputs(x_TD)))
        assert isinstance(x_TD, torch.Tensor)
        shape = self._shape
        mixed_TC, z_TV, b_TH, a_TH = self._inputs(x_TD)
        mixed_TC = self.conv1d(mixed_TC, batch)
        q, k, v = mixed_TC.split([shape.keys, shape.keys, shape.values], -1)
        decay = -self.A_log.float().exp() * F.softplus(a_TH.float() + self.dt_bias.float())
        inputs = DeltaInputs(
            q.unflatten(1, (shape.key_heads, -1)),
            k.unflatten(1, (shape.key_heads, -1)),
            v.unflatten(1, (shape.value_heads, -1)),
            decay,
            b_TH.sigmoid(),
        )
        out_THV = self.scans.delta(inputs, state_of(batch, self._part + 1), scan_spans(batch))
        normed, _ = self.gate_norm(out_THV.to(x_TD.dtype).flatten(0, 1))
        gate = F.silu(z_TV.float()).unflatten(1, (shape.value_heads, -1)).flatten(0, 1)
        out_TV = (normed.float() * gate).to(x_TD.dtype).view(len(x_TD), -1)
        return self.out_proj(out_TV)

    def _traced(self, inputs: _TracedInputs) -> TracedTensor:
        """Input of the last projection."""
        shape, tracer = self._shape, recurrent(inputs.mixed)
        layer = DeltaLayer(
            part=self._part + 1,
            a_log=self.A_log,
            dt_bias=self.dt_bias,
            key_heads=shape.key_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            eps=EPS,
        )
        mixed = self.conv1d.traced(Columns(inputs.mixed))
        qkv = Columns(mixed), Columns(mixed, shape.keys), Columns(mixed, 2 * shape.keys)
        y = tracer.delta(qkv, inputs.beta, inputs.decay, layer)
        rule = GateRule(
            function="silu",
            norm="before",
            weight=self.gate_norm.weight,
            parts=shape.value_heads,
            eps=self.gate_norm.eps,
        )
        return tracer.gate(y, inputs.z, rule)

    def _project(self, build: Build, shape: DeltaShape, shares: _DeltaShares) -> None:
        wide = 2 * (shape.keys + shape.values) // shape.key_heads
        narrow = 2 * shape.value_heads // shape.key_heads
        self.in_proj_qkvz = ColumnParallel(build, shape.dim, Split(shares.key_heads.times(wide)))
        self.in_proj_ba = ColumnParallel(build, shape.dim, Split(shares.key_heads.times(narrow)))

    def _inputs(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the convolution, and gates (T, values), beta and decay (T, heads)."""
        shape = self._shape
        each = shape.value_heads // shape.key_heads
        wide = self.in_proj_qkvz(x_TD).unflatten(1, (shape.key_heads, -1))
        sizes = [shape.key_dim, shape.key_dim, each * shape.value_dim, each * shape.value_dim]
        q, k, v, z = (part.flatten(1) for part in wide.split(sizes, -1))
        narrow = self.in_proj_ba(x_TD).unflatten(1, (shape.key_heads, -1))
        b_TH, a_TH = (part.flatten(1) for part in narrow.split([each, each], -1))
        return torch.cat((q, k, v), -1), z, b_TH, a_TH

    def _traced_inputs(self, x: TracedTensor) -> _TracedInputs:
        """`_inputs` as ops of a traced program."""
        shape, tracer, wide = self._shape, recurrent(x), self.in_proj_qkvz(x)
        each = shape.value_heads // shape.key_heads * shape.value_dim
        sizes = [shape.key_dim, shape.key_dim, each, each]
        q, k, v, z = _parts_of_heads(sizes, shape.key_heads)
        gate = tracer.take_columns(wide, z)
        mixed = tracer.take_columns(wide, [*q, *k, *v])
        return _TracedInputs(mixed, Columns(gate), *self._factors(x))

    def _factors(self, x: TracedTensor) -> tuple[Columns, Columns]:
        """Beta and decay, from one projection whose outputs are grouped by key heads."""
        shape, tracer, narrow = self._shape, recurrent(x), self.in_proj_ba(x)
        each = shape.value_heads // shape.key_heads
        b, a = _parts_of_heads([each, each], shape.key_heads)
        return Columns(tracer.take_columns(narrow, b)), Columns(tracer.take_columns(narrow, a))


class HalfSplitDelta(GatedDelta):
    """Gated delta net with queries, keys and values in one projection, as the convolution reads."""

    def _project(self, build: Build, shape: DeltaShape, shares: _DeltaShares) -> None:
        narrow = 2 * shape.value_heads // shape.key_heads
        joined = Split(shares.keys, shares.keys, shares.values)
        self.in_proj_qkv = ColumnParallel(build, shape.dim, joined)
        self.in_proj_z = ColumnParallel(build, shape.dim, Split(shares.values))
        self.in_proj_ba = ColumnParallel(build, shape.dim, Split(shares.key_heads.times(narrow)))

    def _inputs(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        narrow = self.in_proj_ba(x_TD).unflatten(1, (self._shape.key_heads, -1))
        b_TH, a_TH = (part.flatten(1) for part in narrow.chunk(2, -1))
        return self.in_proj_qkv(x_TD), self.in_proj_z(x_TD), b_TH, a_TH

    def _traced_inputs(self, x: TracedTensor) -> _TracedInputs:
        wide, z = self.in_proj_qkv(x), self.in_proj_z(x)
        return _TracedInputs(wide, Columns(z), *self._factors(x))


class SplitDelta(GatedDelta):
    """Gated delta net of Qwen3.5: a projection per input."""

    def _project(self, build: Build, shape: DeltaShape, shares: _DeltaShares) -> None:
        joined = Split(shares.keys, shares.keys, shares.values)
        self.in_proj_qkv = ColumnParallel(build, shape.dim, joined)
        self.in_proj_z = ColumnParallel(build, shape.dim, Split(shares.values))
        self.in_proj_b = ColumnParallel(build, shape.dim, Split(shares.value_heads))
        self.in_proj_a = ColumnParallel(build, shape.dim, Split(shares.value_heads))

    def _inputs(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide, z = self.in_proj_qkv(x_TD), self.in_proj_z(x_TD)
        return wide, z, self.in_proj_b(x_TD), self.in_proj_a(x_TD)

    def _traced_inputs(self, x: TracedTensor) -> _TracedInputs:
        wide, z = self.in_proj_qkv(x), Columns(self.in_proj_z(x))
        return _TracedInputs(wide, z, Columns(self.in_proj_b(x)), Columns(self.in_proj_a(x)))


def _parts_of_heads(sizes: Sequence[int], heads: int) -> list[list[int]]:
    """Column indices of each part, where each head has all of its parts side by side."""
    width, firsts = sum(sizes), itertools.accumulate([0, *sizes[:-1]])
    return [
        [head * width + first + i for head in range(heads) for i in range(size)]
        for first, size in zip(firsts, sizes, strict=True)
    ]
