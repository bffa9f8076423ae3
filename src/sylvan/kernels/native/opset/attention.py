"""Ops of paged attention, including latent attention.

Shapes: T rows, C columns, H heads, D columns of a head.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


class PageFormat(IntEnum):
    """Page contents: the rows' dtype, numbers with scales, or keys whose first columns are values.

    Heads of 4-bit pages are rotated by a Hadamard matrix.
    """

    ROWS = 0
    INT8 = 1
    SHARED = 2
    INT4 = 3
    FP8_E4M3 = 4
    FP8_E5M2 = 5


@operands
class KVPages(Operands):
    """Heads of an attention layer and the pages of their keys and values, as in `pages.h`.

    `whole_text`: bidirectional attention over whole texts, in pages of the program.
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
class RopeStore(Op):
    """Norms and rotary positions of query and key heads; keys and values go into their pages.

    Norms are of each head, or `whole`: of all heads at once; `norm_last`: after rotary positions.
    Queries are multiplied by the scale of their position at last. `k_scales`, `v_scales`: scales of
    FP8 pages; without them, each head of a token is scaled by its largest magnitude.
    """

    qkv: Annotated[int, updates("row", "T, heads of queries, keys, values")]
    kv: KVPages
    cos_sin: Annotated[BufferRef, reads("f32", "positions, rotary_dim")] = None
    q_norm: Annotated[BufferRef, reads("f32", "D or H D")] = None
    k_norm: Annotated[BufferRef, reads("f32", "D or H D")] = None
    q_scales: Annotated[BufferRef, reads("f32", "positions")] = None
    k_scales: Annotated[BufferRef, reads("f32", "H")] = None
    v_scales: Annotated[BufferRef, reads("f32", "H")] = None
    rotary_dim: int = 0
    interleaved: bool = False
    q_norm_whole: bool = False
    k_norm_whole: bool = False
    norm_last: bool = False
    q_eps: float = 0.0
    k_eps: float = 0.0


@operands
class BlockMask(Operands):
    """Blocks of `size` tokens that rows see, or 0: everything; see `api.BlockPattern`."""

    size: int = 0
    near: int = 1
    stride: int = 1
    step: int = 0
    first_head: int = 0


EVERY_BLOCK = BlockMask()


@operands
class Attention(Op):
    """Attention of queries to the pages of their requests.

    `window`: number of visible tokens, or 0. `chunk`: size of the chunks within which tokens see
    each other, or 0. `slopes`: decrease of a head's scores per token of distance (ALiBi). `biases`:
    added to a head's scores at distances 0 to `distances` - 1, the last one beyond, too (T5).
    `parts`: partial results of long requests, merged by the next op. `work`: index of the op's
    group size among those of the program, set by the library.
    """

    qkv: Annotated[int, reads("row", "T, heads of queries, keys, values")]
    kv: KVPages
    out: Annotated[int, writes("row", "T, H value_dim")]
    parts: Annotated[int, updates("f32", "parts_mib")]
    sinks: Annotated[BufferRef, reads("f32", "H")] = None
    slopes: Annotated[BufferRef, reads("f32", "H")] = None
    blocks: BlockMask = EVERY_BLOCK
    biases: Annotated[BufferRef, reads("f32", "H, distances")] = None
    window: int = 0
    chunk: int = 0
    distances: int = 0
    parts_mib: int
    work: int = 0
    scale: float
    softcap: float = 0.0


@operands
class AttentionMerge(Attention):
    """Merges the partial results that `Attention` spread over threads (split-KV); same operands."""


@operands
class LatentRows(Op):
    """Rows for latent attention: rotated columns of queries, and the one key and its value.

    The latent columns of the query heads are written later, by products. Without `cos_sin`, nothing
    is rotated (NoPE).
    """

    q: Annotated[int, reads("row", "T, H (qk_nope_head_dim + qk_rope_head_dim)")]
    kv: Annotated[int, reads("row", "T, kv_lora_rank + qk_rope_head_dim")]
    cos_sin: Annotated[BufferRef, reads("f32", "positions, qk_rope_head_dim")] = None
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
    """Copies heads of rows, `step` columns apart, to one row each, head by head."""

    x: Annotated[int, reads("row", "T, C")]
    stack: Annotated[int, writes("row", "H T, width")]
    num_heads: int
    width: int
    step: int
    cols: int


@operands
class FromStack(Op):
    """Inverse of `ToStack`; other columns stay unchanged, except for the padding."""

    stack: Annotated[int, reads("row", "H T, width")]
    out: Annotated[int, updates("row", "T, C")]
    num_heads: int
    width: int
    step: int
    cols: int
