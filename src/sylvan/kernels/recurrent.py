"""The interface of recurrent layers in step programs: layer definitions, and their tracer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from sylvan.kernels.api import LinearWeight, TracedTensor, Unsupported


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of traced rows from `first` on; the op that reads them knows their number."""

    rows: TracedTensor
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvLayer:
    """A causal depthwise convolution; constant over the life of a model.

    Attributes:
        part: Number of its state.
        weight: Taps of the channels, (C, 1, K).
        bias: Bias of the channels, (C,).
        silu: Whether SiLU is applied to the rounded sum.
        gated: Whether its rows hold factors of inputs, factors of outputs, and inputs (LFM2).
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
        decay: A if there are no time steps (all are 1), else log(-A): (H,), or (H, N) if the states
            of a head decay differently.
        skip: D, by which inputs are multiplied and added to outputs, (H,).
        dt_bias: Bias of time steps before softplus, (H,); None: the rows include it.
        dt_limit: Bounds to which time steps are clamped.
        groups: Number of groups of heads that share B and C.
        states: State numbers per channel, N.
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
        a_log: Decays are exp(-exp(a_log) softplus(rows + dt_bias)), (H,).
        dt_bias: Bias of the decay, (H,).
        key_heads: Number of key heads, each shared by equally many value heads.
        key_dim: Columns of a key.
        value_dim: Columns of a value.
        eps: Added to the sum of squares when keys and queries are normalised.
        by_key: Each column of a key has its own decay (KDA): `dt_bias` and rows are (.., H K).
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
        part: Number of its state: per head a matrix, a sum of keys, and a scale of both.
        heads: Number of heads.
        key_dim: Columns of a key.
        value_dim: Columns of a value.
        eps: Added to the divisor of outputs.
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
        param: Its softplus is the decay rate of each channel, (C,).
        takes: Weight (H, B, B) and bias (H, B) of the input gate.
        keeps: Weight and bias of the recurrence gate.
    """

    part: int
    param: torch.Tensor
    takes: tuple[LinearWeight, LinearWeight]
    keeps: tuple[LinearWeight, LinearWeight]


@dataclass(frozen=True, kw_only=True, slots=True)
class WkvLayer:
    """RWKV-4's weighted mean of values (WKV); constant over the life of a model. Vectors: (C,)."""

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
    """RWKV-7's matrix states (WKV-7); constant over the life of a model. Vectors: (C,).

    Attributes:
        part: Number of its state.
        heads: Number of heads.
        k_k: Factor of keys for removal from the state.
        k_a: Strength with which the learning rate changes keys.
        r_k: Weight of the row's own value in the output.
        norm: Weight and bias of the norm of heads.
        eps: Epsilon of that norm.
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
    """How rows are gated and normed.

    Attributes:
        function: Activation of the gate.
        norm: "before": RMSNorm before the product with the gate, one weight for all parts; "after":
            RMSNorm after it; "layer": LayerNorm before it; None: no norm.
        weight: Weight of the norm.
        bias: Bias of a LayerNorm.
        parts: Number of equal parts of a row that are normed separately.
        eps: Epsilon of the norm.
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
        """Float32 rows, (T, H V); `gates`: input and forget gates, float32 (T, H)."""
        ...

    def gate(self, y: TracedTensor, gate: Columns, rule: GateRule) -> TracedTensor:
        """Rows of the model's dtype, as wide as y."""
        ...

    def weighted(
        self, a: TracedTensor, b: TracedTensor, a_factor: float, b_factor: float
    ) -> TracedTensor:
        """a_factor a + b_factor b, as float32 rows."""
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
        """Token shift: x + (before - x) share; a sigmoid is applied to traced shares.

        `row_share` is added to a share of columns. With `sums`, computed as x share + before
        (1 - share).
        """
        ...

    def wkv(
        self, key: TracedTensor, value: TracedTensor, receptance: TracedTensor, layer: WkvLayer
    ) -> TracedTensor:
        """Rows of the model's dtype, (T, C), gated by the sigmoid of receptance."""
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
        """Column i of the result is column order[i] of x."""
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
    """Return the tracer of recurrent layers for the program of x.

    Raises:
        Unsupported: The tracer has no memory for states.
    """
    if not isinstance(x.tracer, _HasStates):
        raise Unsupported("recurrent layers")
    return x.tracer.recurrent
