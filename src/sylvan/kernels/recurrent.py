"""The interface of recurrent layers in programs: what layers are, and what emits their ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from sylvan.kernels.api import LinearWeight, TracedTensor, Unsupported


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns of traced rows, from `first` on; the op that reads them knows how many."""

    rows: TracedTensor
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvLayer:
    """A causal depthwise convolution; constant over the life of a model.

    Attributes:
        part: Number of its state.
        weight: (C, 1, K).
        bias: (C,).
        silu: Whether the sum, rounded, goes through SiLU.
        gated: Whether its rows are factors of inputs, factors of outputs, and inputs (LFM2).
    """

    part: int
    weight: LinearWeight
    bias: torch.Tensor | None
    silu: bool = False
    gated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceLayer:
    """A selective state space; constant over the life of a model.

    Attributes:
        part: Number of its state.
        width: Channels of a head.
        decay: A, of time steps that are all 1; with time steps log(-A): (H,), or (H, N) if states
            of a head decay differently.
        skip: (H,), by which inputs are multiplied and added to outputs.
        dt_bias: (H,), added to time steps before softplus; None: they have theirs.
        dt_limit: Time steps are kept within it.
        groups: Of heads that share B and C.
        states: Numbers of state of a channel, N.
    """

    part: int
    width: int
    decay: LinearWeight
    skip: torch.Tensor
    groups: int
    states: int
    dt_bias: torch.Tensor | None = None
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaLayer:
    """A gated delta rule; constant over the life of a model.

    Attributes:
        part: Number of its state.
        a_log: (H,); decays are exp(-exp(a_log) softplus(rows + dt_bias)).
        dt_bias: (H,).
        key_heads: Each for as many value heads.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value.
        eps: Added to the squares of a key or query before it is made a unit vector.
        by_key: Each number of a key has a decay of its own (KDA): `dt_bias` and rows are (.., H K).
    """

    part: int
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    key_heads: int
    key_dim: int
    value_dim: int
    eps: float
    by_key: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MlstmLayer:
    """The matrix memory of an xLSTM layer; constant over the life of a model.

    Attributes:
        part: Number of its state: of each head the matrix, a sum of keys, and a scale of both.
        heads: How many there are.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value.
        eps: Added to what outputs are divided by.
    """

    part: int
    heads: int
    key_dim: int
    value_dim: int
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RgLruLayer:
    """A real-gated linear recurrence; constant over the life of a model.

    Attributes:
        part: Number of its state.
        param: (C,); the softplus of it says how fast channels fade.
        takes: Weight (H, B, B) and bias (H, B) of the gate of what is taken in.
        keeps: The same of what is kept.
    """

    part: int
    param: torch.Tensor
    takes: tuple[LinearWeight, LinearWeight]
    keeps: tuple[LinearWeight, LinearWeight]


@dataclass(frozen=True, kw_only=True, slots=True)
class WkvLayer:
    """RWKV-4's mean of values; constant over the life of a model. Vectors: (C,)."""

    part: int
    time_decay: torch.Tensor
    time_first: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Wkv6Layer:
    """Matrices of RWKV-5 and RWKV-6; constant over the life of a model. Vectors: (C,).

    Attributes:
        part: Number of their state.
        heads: How many there are.
        time_decay: Logarithm of how fast keys fade; None: rows have theirs.
        time_first: Weights of the newest token's keys.
    """

    part: int
    heads: int
    time_decay: torch.Tensor | None
    time_first: torch.Tensor


class Wkv6Rows(NamedTuple):
    """Rows (T, C) of an RWKV-5 or RWKV-6 layer; `decay`, float32, is that layer's `time_decay`."""

    query: TracedTensor
    key: TracedTensor
    value: TracedTensor
    decay: TracedTensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wkv7Layer:
    """RWKV-7's matrices; constant over the life of a model. Vectors: (C,).

    Attributes:
        part: Number of their state.
        heads: How many there are.
        k_k: Makes of keys what is forgotten.
        k_a: How much rates change keys.
        r_k: Of the row's own value.
        norm: Weight and bias of the norm of heads.
        eps: Of that norm.
    """

    part: int
    heads: int
    k_k: torch.Tensor
    k_a: torch.Tensor
    r_k: torch.Tensor
    norm: tuple[torch.Tensor, torch.Tensor]
    eps: float


class Wkv7Rows(NamedTuple):
    """Rows (T, C) of an RWKV-7 layer; decay and rate are before their sigmoids."""

    query: TracedTensor
    decay: TracedTensor
    key: TracedTensor
    value: TracedTensor
    rate: TracedTensor
    gate: TracedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRule:
    """How rows are gated.

    Attributes:
        function: Of the gate.
        norm: None, or where equal parts of the rows are divided by their root mean square: before
            they are multiplied by the gate (the weight is that of a part) or after it. "layer": by
            their deviation, less their mean, before.
        weight: Of the norm.
        bias: Of a "layer" norm.
        parts: How many there are.
        eps: Added to the mean of squares.
    """

    function: Literal["silu", "sigmoid"]
    norm: Literal["before", "after", "layer"] | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    parts: int = 1
    eps: float = 0.0


class RecurrentTracer(Protocol):
    """Emits ops of recurrent layers. `layers.recurrent` says what they compute on tensors.

    Raises:
        Unsupported: from any method, when the shapes have no kernel.
    """

    def conv(self, x: Columns, layer: ConvLayer) -> TracedTensor:
        """Rows of the model's dtype, (T, C)."""
        ...

    def space(
        self, x: Columns, dt: Columns | None, bc: tuple[Columns, Columns], layer: SpaceLayer
    ) -> TracedTensor:
        """Float32 rows, (T, H width); `dt` None: time steps are 1."""
        ...

    def delta(
        self, qkv: tuple[Columns, Columns, Columns], beta: Columns, a: Columns, layer: DeltaLayer
    ) -> TracedTensor:
        """Float32 rows, (T, H V)."""
        ...

    def mlstm(
        self,
        qkv: tuple[Columns, Columns, Columns],
        gates: tuple[TracedTensor, TracedTensor],
        layer: MlstmLayer,
    ) -> TracedTensor:
        """Float32 rows, (T, H V); `gates` are float32 (T, H), of what goes in and of what stays."""
        ...

    def gate(self, y: TracedTensor, gate: Columns, rule: GateRule) -> TracedTensor:
        """Rows of the model's dtype, as wide as y."""
        ...

    def weighted(
        self, a: TracedTensor, b: TracedTensor, a_factor: float, b_factor: float
    ) -> TracedTensor:
        """A sum, each row times its factor, as float32 rows."""
        ...

    def mix(
        self,
        x: TracedTensor,
        before: TracedTensor,
        share: torch.Tensor | TracedTensor,
        *,
        row_share: Columns | None = None,
        sums: bool = False,
    ) -> TracedTensor:
        """X + (before - x) share; traced shares are before their sigmoids.

        `row_share` is added to a share of columns. `sums`: as x share + before (1 - share).
        """
        ...

    def wkv(
        self, key: TracedTensor, value: TracedTensor, receptance: TracedTensor, layer: WkvLayer
    ) -> TracedTensor:
        """Rows of the model's dtype, (T, C), opened by receptance."""
        ...

    def rg_lru(self, x: TracedTensor, gate: TracedTensor, layer: RgLruLayer) -> TracedTensor:
        """Rows of the model's dtype, (T, C), times those of `gate`."""
        ...

    def wkv6(self, rows: Wkv6Rows, layer: Wkv6Layer) -> TracedTensor:
        """Float32 rows, (T, C)."""
        ...

    def wkv7(self, rows: Wkv7Rows, layer: Wkv7Layer) -> TracedTensor:
        """Rows of the model's dtype, (T, C), gated."""
        ...

    def take_columns(self, x: TracedTensor, order: Sequence[int]) -> TracedTensor:
        """The columns of x whose numbers are in `order`."""
        ...

    def join_columns(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
        """The columns of a, then those of b."""
        ...

    def linear_heads(self, x: TracedTensor, weight: LinearWeight) -> TracedTensor:
        """Multiply equal parts of rows by a matrix each: (T, H K) and (H, N, K) to (T, H N)."""
        ...


@runtime_checkable
class _HasStates(Protocol):
    @property
    def recurrent(self) -> RecurrentTracer: ...


def recurrent(x: TracedTensor) -> RecurrentTracer:
    """Emitter of ops of recurrent layers, for the program that x is of.

    Raises:
        Unsupported: its tracer has no memory for states.
    """
    if not isinstance(x.tracer, _HasStates):
        raise Unsupported("recurrent layers")
    return x.tracer.recurrent
