"""Sparse attention on GPUs: scores of the indexer, and attention to the selected slots.

Scores read index keys in place, at the end of the rows in pages. Attention is the decode kernel
over pages of one token each: the slots of a row are its page table.

Shapes: T rows, N heads, C latent and rotary columns, H indexer heads, I their columns, S
tokens of a request, K selected ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.gpu.launch import arch_of, launch
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.paged.pages import LayerKV
from sylvan.kernels.paged.triton_attention import decode

_TOKENS = 32  # scored by one program
_MIN_BLOCK = 16  # smallest block of a matrix unit


@triton.jit
def scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    pages_ptr,
    out_ptr,
    first,
    length,
    row_stride,
    out_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of a block of tokens for one row; tokens after the row have none."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = token < length
    page = tl.load(pages_ptr + token // PAGE, mask=valid, other=0).to(tl.int64)
    place = page * PAGE + token % PAGE
    col = tl.arange(0, WIDTH_BLOCK)
    mask = (col < WIDTH)[:, None] & valid[None, :]
    keys = tl.load(keys_ptr + place[None, :] * row_stride + col[:, None], mask=mask, other=0.0)
    keys = keys.to(tl.float32)
    q_ptr += row * (HEADS * WIDTH)
    score = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, HEADS, HEAD_BLOCK):  # few at a time, as registers hold no more
        head = start + tl.arange(0, HEAD_BLOCK)
        inside = (head < HEADS)[:, None] & (col < WIDTH)[None, :]
        q = tl.load(q_ptr + head[:, None] * WIDTH + col[None, :], mask=inside, other=0.0)
        products = tl.dot(q, keys, input_precision=PRECISION)
        weights = tl.load(weights_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)
        score += tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
    seen = token <= first + row
    score = tl.where(seen, score, float("-inf"))
    tl.store(out_ptr + row * out_stride + token, score, mask=valid)


def choose_tokens(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    rows_PS1W: torch.Tensor,
    pages_P: torch.Tensor,
    length: int,
    top_k: int,
) -> torch.Tensor:
    """As `reference.choose_tokens`."""
    rows, heads, width = q_THI.shape
    page = rows_PS1W.shape[1]
    score_TS = q_THI.new_empty(rows, length, dtype=torch.float32)
    arch = arch_of(q_THI)
    tokens = length if arch == "interpreter" else _TOKENS
    block = max(_MIN_BLOCK, power_of_two(tokens))
    launch(
        scores_kernel,
        (rows, ceil_div(length, block)),
        q_THI.float().contiguous(),
        weights_TH.float().contiguous(),
        rows_PS1W[..., rows_PS1W.shape[-1] - width :],
        pages_P,
        score_TS,
        length - rows,
        length,
        rows_PS1W.stride(1),
        score_TS.stride(0),
        HEADS=heads,
        WIDTH=width,
        PAGE=page,
        HEAD_BLOCK=_MIN_BLOCK,
        WIDTH_BLOCK=max(_MIN_BLOCK, power_of_two(width)),
        BLOCK=block,
        PRECISION="tf32x3" if arch.startswith("sm") else "ieee",
        num_warps=4,
    )
    order_TS = score_TS.sort(dim=-1, descending=True, stable=True).indices
    return order_TS[:, :top_k].sort(-1).values


def attend_slots(
    q_TNC: torch.Tensor,
    rows_PS1W: torch.Tensor,
    slots_TK: torch.Tensor,
    layer: AttentionLayer,
    value_dim: int,
) -> torch.Tensor:
    """As `reference.attend_slots`."""
    rows, chosen = slots_TK.shape
    columns, device = q_TNC.shape[-1], q_TNC.device
    flat = rows_PS1W.flatten(0, 1)[:, None]
    pages = LayerKV(
        keys=flat[..., :columns],
        values=flat[..., :value_dim],
        table_SP=slots_TK.int().contiguous(),
        rows_R=torch.arange(rows, dtype=torch.int32, device=device),
        lens_R=torch.full((rows,), chosen, dtype=torch.int32, device=device),
    )
    return decode(q_TNC, pages, layer)
