"""Every op of step programs, and the groups of operands that several of them have.

To add an op, write its class here and put it into `OPS`, write its kernel in C++, and a method of
the tracer that emits it.

Shapes: T rows of the op (its `rows` times `times`), C columns, H heads, D columns of a head, E
experts, K experts of a row, G groups, S state slots, R requests, N numbers of state. "row" numbers
are of the op's `dtype`, "packed" ones are in kernel order; rows are padded to 32 columns. Standard
library only, as `schema`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from sylvan.kernels.native.schema import (
    BufferRef,
    Op,
    Operands,
    operands,
    reads,
    updates,
    writes,
)


class Function(IntEnum):
    """Of one number."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU2 = 4
    SIGMOID = 5
    TANH = 6


class Source(IntEnum):
    """Which numbers of a step an embedding looks up."""

    IDS = 0
    POSITIONS = 1
    TOKEN_TYPES = 2


class WeightFormat(IntEnum):
    """How a packed matrix is kept."""

    DENSE = 0
    INT8 = 1
    INT4 = 2


class PageFormat(IntEnum):
    """What pages hold: rows' own type, int8 with scales, or keys whose first columns are values."""

    ROWS = 0
    INT8 = 1
    SHARED = 2


class Scores(IntEnum):
    """What routing weights are made of."""

    SOFTMAX = 0
    SOFTMAX_CHOSEN = 1
    SIGMOID = 2
    SPARSEMIXER = 3


# ---- groups of operands


@operands
class QuantisedRows(Operands):
    """The op's result rounded to int8 as well, each row by itself: its largest becomes 127.

    Any op that has these can leave its rows so for the linears that read them. `biased`: 128 is
    added where kernels of int8 weights multiply unsigned numbers. `bytes`: of a row.
    """

    qvalues: Annotated[BufferRef, writes("u8", "T, bytes")] = None
    scales: Annotated[BufferRef, writes("f32", "T")] = None
    sums: Annotated[BufferRef, writes("i32", "T, G")] = None
    group: int = 0
    biased: bool = False
    bytes: int = 0


NOT_QUANTISED = QuantisedRows()


@operands
class ResidualStream(Operands):
    """Rows that are normed: x alone, or the residual after x has been added to it.

    With `base` x is added to that instead, and the residual is only written. One of residual and x
    may be absent.
    """

    residual: Annotated[BufferRef, updates("f32", "T, C")] = None
    x: Annotated[BufferRef, reads("row", "T, C")] = None
    base: Annotated[BufferRef, reads("row", "T, C")] = None


@operands
class KVPages(Operands):
    """Heads of an attention layer and the pages of their keys and values, as in `pages.h`.

    `whole_text`: every token sees its whole text, which this step holds, in pages of the program.
    `table`: group of layers whose page table is read. Steps: numbers from one page to the next.
    """

    keys: Annotated[int, updates("packed", "pages, H, page_size, D")]
    values: Annotated[int, updates("packed", "pages, H, page_size, D")]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    format: PageFormat = PageFormat.ROWS
    whole_text: bool = False
    table: int = 0
    key_step: int = 0
    value_step: int = 0


@operands
class StateSlots(Operands):
    """Where states of requests are read and go; saves are (rows, slot), by rising rows."""

    slots: Annotated[int, reads("i32", "R")]
    first_saves: Annotated[int, reads("i32", "R + 1")]
    saves: Annotated[int, reads("i32", "saves, 2")]


# ---- ops


@operands
class Embed(Op):
    """Rows of a packed matrix, times `scale`; ids beyond the last row read that one."""

    out: Annotated[int, writes("f32", "T, C")]
    weight: Annotated[int, reads("packed", "vocab_rows, C")]
    col_scale: Annotated[BufferRef, reads("f32", "vocab_rows (int8) or G, vocab_rows (int4)")] = (
        None
    )
    source: Source
    cols: int
    vocab_rows: int
    format: WeightFormat = WeightFormat.DENSE
    words: int = 0
    group: int = 0
    scale: float = 1.0


@operands
class RmsNorm(Op):
    """Rows over their root mean square, times a weight that is zero in the padding."""

    stream: ResidualStream
    weight: Annotated[int, reads("f32", "C")]
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    eps: float


@operands
class LayerNorm(Op):
    """Rows less their mean over their deviation, times a weight, plus a bias."""

    stream: ResidualStream
    weight: Annotated[int, reads("f32", "C")]
    bias: Annotated[BufferRef, reads("f32", "C")] = None
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    eps: float


@operands
class Quantise(Op):
    """Rows rounded to int8, where the op that makes them cannot do it."""

    x: Annotated[int, reads("row", "T, C")]
    quantised: QuantisedRows
    cols: int


@operands
class Linear(Op):
    """Rows times a matrix, plus a bias. Traced as this; packing decides the format.

    With `groups` (how many; of each the matrix, the first row and the rows) the weight is a stack
    of matrices. `words`: 32-bit words of inputs in a block of 16 outputs. `x_bytes`: from one row
    of x to the next. Head steps: from what one matrix of a stack reads of x (bytes) and writes of
    out (columns) to what the next does.
    """

    x: Annotated[int, reads("row", "T, C")]
    weight: Annotated[int, reads("packed", "outputs, C")]
    bias: Annotated[BufferRef, reads("f32", "outputs")] = None
    out: Annotated[int, writes("row", "T, outputs")]
    row_scale: Annotated[BufferRef, reads("f32", "T")] = None
    col_scale: Annotated[BufferRef, reads("f32", "outputs (int8) or G, outputs (int4)")] = None
    sums: Annotated[BufferRef, reads("i32", "outputs (int8) or T, G (int4)")] = None
    groups: Annotated[BufferRef, reads("i32", "1 + 3 groups")] = None
    cols: int
    outputs: int
    out_f32: bool = False
    words: int = 0
    group: int = 0
    x_bytes: int = 0
    x_head_step: int = 0
    out_head_step: int = 0
    out_stride: int = 0


@operands
class LinearInt8(Linear):
    """The same by int8 weights with a scale for each output; x is quantised rows."""


@operands
class LinearInt4(Linear):
    """The same by int4 weights with a scale for each group of inputs and output."""


@operands
class Glu(Op):
    """A function of the first half of each row, times the second half.

    `clamped`: GPT-OSS's form: both halves clamped at `limit`, the sigmoid of alpha times the gate.
    """

    gate_up: Annotated[int, reads("row", "T, 2 C")]
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    function: Function
    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0


@operands
class Activation(Op):
    """A function of each number."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    function: Function


@operands
class RopeStore(Op):
    """Norms and rotary positions of query and key heads; keys and values go into their pages.

    Norms are of each head, or `whole`: of all heads at once.
    """

    qkv: Annotated[int, updates("row", "T, heads of queries, keys, values")]
    kv: KVPages
    cos_sin: Annotated[BufferRef, reads("f32", "positions, rotary_dim")] = None
    q_norm: Annotated[BufferRef, reads("f32", "D or H D")] = None
    k_norm: Annotated[BufferRef, reads("f32", "D or H D")] = None
    rotary_dim: int = 0
    interleaved: bool = False
    q_norm_whole: bool = False
    k_norm_whole: bool = False
    q_eps: float = 0.0
    k_eps: float = 0.0


@operands
class Attention(Op):
    """Queries over the pages of their requests.

    `window`: tokens that one sees, or 0. `parts`: chunks of long requests, merged by the next op.
    `work`: index of the heads of a group among those of the program, set by the library.
    """

    qkv: Annotated[int, reads("row", "T, heads of queries, keys, values")]
    kv: KVPages
    out: Annotated[int, writes("row", "T, H value_dim")]
    parts: Annotated[int, updates("f32", "parts_mib")]
    sinks: Annotated[BufferRef, reads("f32", "H")] = None
    window: int = 0
    parts_mib: int
    work: int = 0
    scale: float
    softcap: float = 0.0


@operands
class AttentionMerge(Attention):
    """Merges the chunks that `Attention` spread over threads; the same operands."""


@operands
class TakeRows(Op):
    """The rows whose logits are wanted."""

    x: Annotated[int, reads("row", "tokens, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int


@operands
class Add(Op):
    """a + scale b, of a's type: `a_f32`, `b_f32` beside rows of another type."""

    a: Annotated[int, reads("row", "T, C")]
    b: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    a_f32: bool = False
    b_f32: bool = False
    scale: float = 1.0


@operands
class Scale(Op):
    """Rows times a number; `f32` beside rows of another type."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    f32: bool = False
    factor: float


@operands
class Softcap(Op):
    """cap tanh(x / cap); `f32` beside rows of another type."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    f32: bool = False
    cap: float


@operands
class Cast(Op):
    """Float32 rows as the rows' type."""

    x: Annotated[int, reads("f32", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int


@operands
class ScaleRows(Op):
    """Rows, each times column 0 of its factors."""

    x: Annotated[int, reads("row", "T, C")]
    factors: Annotated[int, reads("row", "T, 1")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int


@operands
class Route(Op):
    """Which experts a row goes to, with which weights, without gaps between rows.

    `group_rank`: how many of a group's best experts rank it.
    """

    logits: Annotated[int, reads("f32", "T, E")]
    bias: Annotated[BufferRef, reads("f32", "E")] = None
    experts: Annotated[int, writes("i32", "T, K")]
    weights: Annotated[int, writes("f32", "T, K")]
    num_experts: int
    top_k: int
    scores: Scores
    normalise: bool
    groups: int
    kept_groups: int
    group_rank: int
    scale: float
    jitter: float


@operands
class MoeAlign(Op):
    """Orders the pairs of a row and an expert (row K + k) by expert, then by row.

    `load` counts the rows of each expert. `groups` are as `Linear` reads them.
    """

    experts: Annotated[int, reads("i32", "T, K")]
    load: Annotated[int, updates("i64", "E")]
    sorted_pairs: Annotated[int, writes("i32", "T K")]
    pair_places: Annotated[int, writes("i32", "T K")]
    groups: Annotated[int, writes("i32", "1 + 3 groups")]
    num_experts: int
    top_k: int


@operands
class GatherRows(Op):
    """Rows of x for the sorted pairs, each times the weight of its pair if there are `weights`."""

    x: Annotated[int, reads("row", "T / K, C")]
    sorted_pairs: Annotated[int, reads("i32", "T")]
    out: Annotated[int, writes("row", "T, C")]
    weights: Annotated[BufferRef, reads("f32", "T")] = None
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    top_k: int


@operands
class GatherQuantised(Op):
    """The same for rows that were quantised before, once each however many experts they go to."""

    qvalues: Annotated[int, reads("u8", "T / K, bytes")]
    scales: Annotated[int, reads("f32", "T / K")]
    sums: Annotated[BufferRef, reads("i32", "T / K, G")] = None
    sorted_pairs: Annotated[int, reads("i32", "T")]
    out_qvalues: Annotated[int, writes("u8", "T, bytes")]
    out_scales: Annotated[int, writes("f32", "T")]
    out_sums: Annotated[BufferRef, writes("i32", "T, G")] = None
    bytes: int
    top_k: int
    num_groups: int


@operands
class ExpertSum(Op):
    """The outputs of a row's experts, weighted, added in the order of their numbers."""

    x: Annotated[int, reads("row", "T K, C")]
    pair_places: Annotated[int, reads("i32", "T, K")]
    out: Annotated[int, writes("row", "T, C")]
    weights: Annotated[BufferRef, reads("f32", "T, K")] = None
    cols: int
    top_k: int


@operands
class LatentRows(Op):
    """Rows for attention over latents: rotated columns of queries, and the one key and its value.

    The latent columns of the query heads are written later, by products.
    """

    q: Annotated[int, reads("row", "T, H (qk_nope_head_dim + qk_rope_head_dim)")]
    kv: Annotated[int, reads("row", "T, kv_lora_rank + qk_rope_head_dim")]
    cos_sin: Annotated[int, reads("f32", "positions, qk_rope_head_dim")]
    norm: Annotated[int, reads("f32", "kv_lora_rank")]
    out: Annotated[
        int, writes("row", "T, (H + 1) (kv_lora_rank + qk_rope_head_dim) + kv_lora_rank")
    ]
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_lora_rank: int
    interleaved: bool
    eps: float


@operands
class HeadGroups(Op):
    """Groups of rows for `Linear`: each head's, or `in_place`: the same rows for all heads."""

    groups: Annotated[int, writes("i32", "1 + 3 groups")]
    num_heads: int
    in_place: bool


@operands
class ToStack(Op):
    """Heads of rows, `step` columns apart, as one row each, head by head."""

    x: Annotated[int, reads("row", "T, C")]
    stack: Annotated[int, writes("row", "H T, width")]
    num_heads: int
    width: int
    step: int
    cols: int


@operands
class FromStack(Op):
    """The reverse; other columns of the rows are left as they are, but for the padding."""

    stack: Annotated[int, reads("row", "H T, width")]
    out: Annotated[int, updates("row", "T, C")]
    num_heads: int
    width: int
    step: int
    cols: int


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


OPS: tuple[type[Op], ...] = (
    Embed,
    RmsNorm,
    LayerNorm,
    Quantise,
    Linear,
    LinearInt8,
    LinearInt4,
    Glu,
    Activation,
    RopeStore,
    Attention,
    AttentionMerge,
    TakeRows,
    Add,
    Scale,
    Softcap,
    Cast,
    ScaleRows,
    Route,
    MoeAlign,
    GatherRows,
    GatherQuantised,
    ExpertSum,
    LatentRows,
    HeadGroups,
    ToStack,
    FromStack,
    ShortConv,
    SpaceScan,
    DeltaScan,
)
"""Every op; its place is its number in the library."""
