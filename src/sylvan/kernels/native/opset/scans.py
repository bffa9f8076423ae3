"""Ops of recurrent layers over the rows of each request; the step has the slots of their states.

`first` is the first column of an operand in a row, `stride` the distance of rows.

Shapes: T rows, R requests, S state slots, C channels, H heads, G groups, N numbers of state.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from sylvan.kernels.native.opset.rows import Function
from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class ShortConv(Op):
    """Causal depthwise convolution: each channel's last `taps` inputs, oldest first, and a bias.

    `silu`: of the sum, rounded to the rows' type. `gated` (LFM2): x has factors of the inputs, then
    factors of the outputs, then the inputs; both products are rounded.
    """

    x: Annotated[int, reads("row", "T, C or T, 3 C")]
    weight: Annotated[int, reads("f32", "C, taps")]
    bias: Annotated[BufferRef, reads("f32", "C")] = None
    state: Annotated[int, updates("row", "S, taps, C")]
    out: Annotated[int, writes("row", "T, C")]
    channels: int
    taps: int
    weight_stride: int
    x_first: int = 0
    x_stride: int
    out_stride: int
    silu: bool = False
    gated: bool = False


@operands
class SpaceScan(Op):
    """Selective state space: h = exp(dt A) h + dt x B per channel; the output is C h + D x.

    Without dt, dt is 1. `a_by_state`: A differs by state dimension, not only by head. `raw`: dt is
    given as rows, to which softplus(dt + dt_bias) and a clamp to dt_low .. dt_high are applied; a
    is log(-A).
    """

    x: Annotated[int, reads("row", "T, H, width")]
    dt: Annotated[BufferRef, reads("row", "T, H, or f32")] = None
    dt_bias: Annotated[BufferRef, reads("f32", "H")] = None
    a: Annotated[int, reads("f32", "H or H, N")]
    b: Annotated[int, reads("row", "T, G, N")]
    c: Annotated[int, reads("row", "T, G, N")]
    d: Annotated[int, reads("f32", "H")]
    state: Annotated[int, updates("f32", "S, H, width, N")]
    out: Annotated[int, writes("f32", "T, H, width")]
    width: int
    num_heads: int
    states: int
    groups: int
    a_by_state: bool
    a_stride: int = 0
    raw: bool = False
    x_first: int = 0
    x_stride: int
    b_first: int = 0
    b_stride: int
    c_first: int = 0
    c_stride: int
    dt_first: int = 0
    dt_stride: int = 0
    out_stride: int
    dt_low: float = 0.0
    dt_high: float = 0.0


@operands
class DeltaScan(Op):
    """Gated delta rule: S decays by exp(g), then S += k (v - S k) beta; the output is S q.

    Queries and keys are normalised first; `eps` is added to their squares. With `a_log`, decay and
    beta are given as rows: g is -exp(a_log) softplus(decay + dt_bias), and beta is passed through a
    sigmoid and rounded. `by_key` (KDA): each key column of a head has its own decay and bias.
    """

    q: Annotated[int, reads("row", "T, G, key_dim")]
    k: Annotated[int, reads("row", "T, G, key_dim")]
    v: Annotated[int, reads("row", "T, H, value_dim")]
    decay: Annotated[int, reads("row", "T, H or H, key_dim, or f32")]
    beta: Annotated[int, reads("row", "T, H")]
    a_log: Annotated[BufferRef, reads("f32", "H")] = None
    dt_bias: Annotated[BufferRef, reads("f32", "H or H, key_dim")] = None
    state: Annotated[int, updates("f32", "S, H, key_dim, value_dim")]
    out: Annotated[int, writes("f32", "T, H, value_dim")]
    key_dim: int
    value_dim: int
    num_heads: int
    groups: int
    q_first: int = 0
    q_stride: int
    k_first: int = 0
    k_stride: int
    v_first: int = 0
    v_stride: int
    decay_first: int = 0
    decay_stride: int
    beta_first: int = 0
    beta_stride: int
    out_stride: int
    by_key: bool = False
    eps: float


@operands
class MlstmScan(Op):
    """Matrix memory of xLSTM: per head a matrix of values by keys, a sum of keys, a scale of both.

    Each row decays them by the sigmoid of `keep`, adds exp(into) times its value and key, and reads
    the matrix at its query. All are stored relative to exp(scale), which keeps them in range.
    """

    q: Annotated[int, reads("row", "T, H, key_dim")]
    k: Annotated[int, reads("row", "T, H, key_dim")]
    v: Annotated[int, reads("row", "T, H, value_dim")]
    into: Annotated[int, reads("f32", "T, H")]
    keep: Annotated[int, reads("f32", "T, H")]
    state: Annotated[int, updates("f32", "S, H, key_dim (value_dim + 1) + 1")]
    out: Annotated[int, writes("f32", "T, H, value_dim")]
    key_dim: int
    value_dim: int
    num_heads: int
    q_first: int = 0
    q_stride: int
    k_first: int = 0
    k_stride: int
    v_first: int = 0
    v_stride: int
    gate_stride: int
    out_stride: int
    eps: float


@operands
class RgLruScan(Op):
    """Real-gated linear recurrence (arXiv:2402.19427), rounded, times `gate`.

    Input and recurrence gates are sigmoids of products with blocks of `width` columns. The state
    starts at zero, and the first row of a text is not scaled.
    """

    x: Annotated[int, reads("row", "T, C")]
    gate: Annotated[int, reads("row", "T, C")]
    param: Annotated[int, reads("f32", "C")]
    input_weight: Annotated[int, reads("f32", "num_blocks, width width")]
    input_bias: Annotated[int, reads("f32", "num_blocks, width")]
    keep_weight: Annotated[int, reads("f32", "num_blocks, width width")]
    keep_bias: Annotated[int, reads("f32", "num_blocks, width")]
    state: Annotated[int, updates("f32", "S, C")]
    out: Annotated[int, writes("row", "T, C")]
    num_blocks: int
    width: int
    weight_stride: int
    bias_stride: int


@operands
class TokenMix(Op):
    """Token shift (RWKV): x + (before - x) share, rounded at each step.

    The share is `share` (per column), that plus `row_share`, or the sigmoid of `gate`.
    `sums`: computed as x share + before (1 - share).
    """

    x: Annotated[int, reads("row", "T, C")]
    before: Annotated[int, reads("row", "T, C")]
    share: Annotated[BufferRef, reads("f32", "C")] = None
    row_share: Annotated[BufferRef, reads("row", "T, C")] = None
    gate: Annotated[BufferRef, reads("row", "T, C")] = None
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    row_share_first: int = 0
    row_share_stride: int
    sums: bool = False


@operands
class WkvScan(Op):
    """RWKV-4: a weighted mean of each channel's values, times the sigmoid of receptance, rounded.

    The state is the weighted sum, the sum of weights, and the exponent that both are relative to.
    """

    key: Annotated[int, reads("row", "T, C")]
    value: Annotated[int, reads("row", "T, C")]
    receptance: Annotated[int, reads("row", "T, C")]
    time_decay: Annotated[int, reads("f32", "C")]
    time_first: Annotated[int, reads("f32", "C")]
    state: Annotated[int, updates("f32", "S, 3, C")]
    out: Annotated[int, writes("row", "T, C")]
    channels: int


@operands
class Wkv6Scan(Op):
    """RWKV-5 and RWKV-6: matrices S of values by keys; the output is (S + time_first k v) q.

    Then S decays by exp(-exp(decay)) per key, and S += k v. Decays are per column (`time_decay`,
    RWKV-5) or per row (`row_decay`, RWKV-6).
    """

    query: Annotated[int, reads("row", "T, C")]
    key: Annotated[int, reads("row", "T, C")]
    value: Annotated[int, reads("row", "T, C")]
    time_decay: Annotated[BufferRef, reads("f32", "C")] = None
    row_decay: Annotated[BufferRef, reads("f32", "T, C")] = None
    time_first: Annotated[int, reads("f32", "C")]
    state: Annotated[int, updates("f32", "S, H, width, width")]
    out: Annotated[int, writes("f32", "T, C")]
    cols: int
    num_heads: int
    width: int


@operands
class Wkv7Inputs(Operands):
    """Rows of an RWKV-7 layer; `rate` is before its sigmoid, `k_a` scales its effect on keys."""

    query: Annotated[int, reads("row", "T, C")]
    key: Annotated[int, reads("row", "T, C")]
    rate: Annotated[int, reads("row", "T, C")]
    value: Annotated[int, reads("row", "T, C")]
    k_a: Annotated[int, reads("f32", "C")]
    cols: int


@operands
class Wkv7Scan(Op):
    """RWKV-7: matrices of values by keys, which decay per key.

    The value of a key is removed before a new one is stored. `decay` is before its sigmoid; `k_k`
    scales keys for the removal.
    """

    inputs: Wkv7Inputs
    decay: Annotated[int, reads("row", "T, C")]
    k_k: Annotated[int, reads("f32", "C")]
    state: Annotated[int, updates("f32", "S, H, width, width")]
    out: Annotated[int, writes("f32", "T, C")]
    num_heads: int
    width: int


@operands
class Wkv7Out(Op):
    """Output of RWKV-7: rows normed by head, plus the row's own value, rounded, then gated."""

    inputs: Wkv7Inputs
    recalled: Annotated[int, reads("f32", "T, C")]
    gate: Annotated[int, reads("row", "T, C")]
    r_k: Annotated[int, reads("f32", "C")]
    weight: Annotated[int, reads("f32", "C")]
    bias: Annotated[int, reads("f32", "C")]
    out: Annotated[int, writes("row", "T, C")]
    width: int
    eps: float


class GateNorm(IntEnum):
    """Kind and place of the norm of gated rows."""

    NONE = 0
    BEFORE = 1
    AFTER = 2
    LAYER = 3


@operands
class GateRows(Op):
    """Multiplies y by a function of a gate, rounded.

    Equal parts of the rows may be normed: with `BEFORE`, RMSNorm before the product, with a weight
    that all parts share (rounded before and after); with `AFTER`, RMSNorm after it, rounded, with a
    weight of all columns; with `LAYER`, LayerNorm before the product, with a weight and optionally
    a bias of all columns.
    """

    y: Annotated[int, reads("row", "T, C, or f32")]
    gate: Annotated[int, reads("row", "T, C")]
    weight: Annotated[BufferRef, reads("f32", "C of a part or of all")] = None
    bias: Annotated[BufferRef, reads("f32", "C")] = None
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    parts: int = 1
    gate_first: int = 0
    gate_stride: int
    y_f32: bool
    function: Function
    norm: GateNorm = GateNorm.NONE
    eps: float = 0.0
