"""Recurrent layers over the rows of each request.

Shapes: T rows, R requests, S state slots, C channels, H heads, G groups, N numbers of state.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class StateSlots(Operands):
    """Where states of requests are read and go; saves are (rows, slot), by rising rows."""

    slots: Annotated[int, reads("i32", "R")]
    first_saves: Annotated[int, reads("i32", "R + 1")]
    saves: Annotated[int, reads("i32", "saves, 2")]


@operands
class ShortConv(Op):
    """Causal depthwise convolution: each channel's last `taps` inputs, oldest first, and a bias.

    `silu`: of the sum, rounded to the rows' type.
    """

    x: Annotated[int, reads("row", "T, C")]
    weight: Annotated[int, reads("row", "C, taps")]
    bias: Annotated[BufferRef, reads("row", "C")] = None
    state: Annotated[int, updates("row", "S, taps, C")]
    out: Annotated[int, writes("row", "T, C")]
    slots: StateSlots
    channels: int
    taps: int
    x_stride: int
    silu: bool


@operands
class SpaceScan(Op):
    """Selective state space: h = exp(dt A) h + dt x B of each channel, and C h + D x comes out.

    `a_by_state`: A differs by number of state, not only by head.
    """

    x: Annotated[int, reads("row", "T, H, width")]
    dt: Annotated[int, reads("f32", "T, H")]
    a: Annotated[int, reads("f32", "H or H, N")]
    b: Annotated[int, reads("row", "T, G, N")]
    c: Annotated[int, reads("row", "T, G, N")]
    d: Annotated[int, reads("f32", "H")]
    state: Annotated[int, updates("f32", "S, H, width, N")]
    out: Annotated[int, writes("f32", "T, H, width")]
    slots: StateSlots
    width: int
    num_heads: int
    states: int
    groups: int
    a_by_state: bool
    x_stride: int
    b_stride: int
    c_stride: int
    dt_stride: int


@operands
class DeltaScan(Op):
    """Gated delta rule: S decays by exp(g), then S += k (v - S k) beta, and S q comes out.

    Queries and keys are made unit vectors first; `eps` is added to their squares.
    """

    q: Annotated[int, reads("row", "T, G, key_dim")]
    k: Annotated[int, reads("row", "T, G, key_dim")]
    v: Annotated[int, reads("row", "T, H, value_dim")]
    decay: Annotated[int, reads("f32", "T, H")]
    beta: Annotated[int, reads("row", "T, H")]
    state: Annotated[int, updates("f32", "S, H, key_dim, value_dim")]
    out: Annotated[int, writes("f32", "T, H, value_dim")]
    slots: StateSlots
    key_dim: int
    value_dim: int
    num_heads: int
    groups: int
    q_stride: int
    k_stride: int
    v_stride: int
    decay_stride: int
    beta_stride: int
    eps: float
