"""Ops of compressed attention: keys of near tokens, and entries that stand for several tokens.

An entry of `rate` tokens is spread over the last `block` of them: each has an equal part of its
columns. See `sylvan.kernels.compressed`.

Shapes: T rows, C columns, H heads, D columns of a head, I columns of a head of the index, K entries
that are chosen.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class TokenRows(Operands):
    """Pages with a contiguous row of `width` numbers per token.

    `table`: group of layers whose page table is read. `step`: numbers from one page to the next.
    """

    memory: Annotated[int, updates("packed", "pages, page_size, width")]
    width: int
    page_size: int
    table: int
    step: int


@operands
class EntryRows(Operands):
    """Entries in pages: columns `column` and following of rows of tokens, `width` for an entry.

    `rate` 0: there are none.
    """

    tokens: TokenRows
    rate: int
    block: int
    column: int
    width: int


@operands
class TurnHeads(Op):
    """Divides heads by their root mean square if `norm`, then rotates their last columns."""

    x: Annotated[int, updates("row", "T, H, head_dim")]
    cos_sin: Annotated[int, reads("f32", "positions, rotary_dim")]
    num_heads: int
    head_dim: int
    rotary_dim: int
    norm: bool
    eps: float


@operands
class KeyStore(Op):
    """Rotates the last columns of keys, and stores them."""

    x: Annotated[int, reads("row", "T, C")]
    cos_sin: Annotated[int, reads("f32", "positions, rotary_dim")]
    tokens: TokenRows
    cols: int
    rotary_dim: int


@operands
class EntryScan(Op):
    """Weighted sums of the tokens of entries: a softmax over `rate` tokens for each column.

    Logits get the row of `bias` of their token within the entry. With `overlaps`, the first half of
    the columns is summed for the next entry, which adds its own tokens by the second half. The
    state is largest logit, sum of weights and weighted sum, of both halves. Sums are written at the
    last token of an entry; other rows stay unchanged.
    """

    values: Annotated[int, reads("f32", "T, C or 2 C")]
    logits: Annotated[int, reads("f32", "T, C or 2 C")]
    bias: Annotated[int, reads("f32", "rate, bias_stride")]
    state: Annotated[int, updates("f32", "S, 1 or 2, 3, C")]
    out: Annotated[int, writes("f32", "T, C")]
    cols: int
    rate: int
    bias_stride: int
    overlaps: bool


@operands
class EntryStore(Op):
    """Norms, rotates and stores the entries that rows complete; positions are of first tokens."""

    x: Annotated[int, reads("f32", "T, C")]
    norm: Annotated[int, reads("f32", "C")]
    cos_sin: Annotated[int, reads("f32", "positions, rotary_dim")]
    entries: EntryRows
    cols: int
    rotary_dim: int
    eps: float


@operands
class EntryScores(Op):
    """Scores all entries that a row may see, if it sees more than are chosen.

    Scores that do not fit into `scores` are computed by `EntryChoice`.
    """

    entries: EntryRows
    q: Annotated[int, reads("row", "T, H I")]
    weights: Annotated[int, reads("f32", "T, H")]
    scores: Annotated[int, updates("f32", "scores_mib")]
    chosen: Annotated[int, writes("i32", "T, K")]
    num_heads: int
    top_k: int
    scores_mib: int


@operands
class EntryChoice(EntryScores):
    """Selects the best entries of each row, in text order; ties: the earlier; same operands."""


@operands
class CompressedAttention(Op):
    """Attention to a window of tokens, and to entries: all, or `chosen` ones.

    Keys are also values, so the last columns of the output are rotated back.
    """

    q: Annotated[int, reads("row", "T, H, head_dim")]
    tokens: TokenRows
    entries: EntryRows
    chosen: Annotated[BufferRef, reads("i32", "T, K")] = None
    sinks: Annotated[int, reads("f32", "H")]
    cos_sin: Annotated[int, reads("f32", "positions, rotary_dim")]
    out: Annotated[int, writes("row", "T, H, head_dim")]
    num_heads: int
    head_dim: int
    rotary_dim: int
    window: int
    top_k: int = 0
    scale: float
