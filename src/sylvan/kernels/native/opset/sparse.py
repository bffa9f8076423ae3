"""Ops of attention to tokens that an indexer selects.

Shapes: T rows, H heads, C latent and rotary columns, I columns of an indexer head, G indexer heads,
K selected tokens.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class TokenPages(Operands):
    """Pages with a row per token, and separately its indexer key.

    Rows are contiguous, so reading a few is as fast per row as reading all. Indexer keys are all
    read, and stored in kernel order, 16 tokens per block. `table`: group of layers whose page table
    is read. Steps: numbers from one page to the next.
    """

    latents: Annotated[int, updates("packed", "pages, page_size, C")]
    keys: Annotated[int, updates("packed", "pages, page_size / 16, I, 16")]
    cols: int
    key_cols: int
    page_size: int
    table: int = 0
    latent_step: int = 0
    key_step: int = 0


@operands
class TokenStore(Op):
    """Stores the KV of each row: its latent, and the rotated key of the indexer.

    Indexer queries are rotated in place. Layers without an indexer store latents only.
    """

    qkv: Annotated[int, reads("row", "T, (H + 1) C + value_dim")]
    pages: TokenPages
    q: Annotated[BufferRef, updates("row", "T, G I")] = None
    k: Annotated[BufferRef, reads("row", "T, I")] = None
    cos_sin: Annotated[BufferRef, reads("f32", "positions, rotary_dim")] = None
    num_heads: int
    value_dim: int
    index_heads: int = 0
    rotary_dim: int = 0
    interleaved: bool = False


@operands
class IndexScores(Op):
    """Scores all tokens that a row may see, if it sees more than are selected.

    Scores that do not fit into `scores` are computed by `IndexChoice`.
    """

    pages: TokenPages
    q: Annotated[int, reads("row", "T, G I")]
    weights: Annotated[int, reads("f32", "T, G")]
    scores: Annotated[int, updates("f32", "scores_mib")]
    chosen: Annotated[int, writes("i32", "T, K")]
    index_heads: int
    top_k: int
    scores_mib: int


@operands
class IndexChoice(IndexScores):
    """Selects the best tokens of each row, in text order; ties: the earlier; same operands."""


@operands
class SparseAttention(Op):
    """Attention of queries to the selected tokens."""

    qkv: Annotated[int, reads("row", "T, (H + 1) C + value_dim")]
    pages: TokenPages
    chosen: Annotated[int, reads("i32", "T, K")]
    out: Annotated[int, writes("row", "T, H value_dim")]
    num_heads: int
    value_dim: int
    top_k: int
    scale: float
