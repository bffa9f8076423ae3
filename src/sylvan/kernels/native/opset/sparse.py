"""Attention to tokens that an index chooses.

Shapes: T rows, H heads, C latent and rotary columns, I columns of a head of the index, G its
heads, K tokens that are chosen.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


@operands
class TokenPages(Operands):
    """Pages that hold a row for each token, and apart from these its key of the index.

    Rows of tokens lie one after another, so that few of them are read as fast as many. Keys of the
    index are all read, and lie in kernel order, 16 tokens to a block. `table`: group of layers
    whose page table is read. Steps: numbers from one page to the next.
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

    Queries of the index are rotated in place. Layers without an index store latents only.
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
    """Scores of all tokens that a row may see, if it sees more than are chosen.

    Computed here where they fit into `scores` and by `IndexChoice` where they do not.
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
    """The best tokens of each row in their order, the earlier ones of equals; the same operands."""


@operands
class SparseAttention(Op):
    """Queries over the tokens that are chosen for their rows."""

    qkv: Annotated[int, reads("row", "T, (H + 1) C + value_dim")]
    pages: TokenPages
    chosen: Annotated[int, reads("i32", "T, K")]
    out: Annotated[int, writes("row", "T, H value_dim")]
    num_heads: int
    value_dim: int
    top_k: int
    scale: float
