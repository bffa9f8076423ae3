"""Latent attention to the tokens that an indexer selects (DeepSeek-V3.2-Exp's technical report).

The indexer adds the scores of a few small heads and selects the best tokens. Ties go to the earlier
token, so the selection depends on the scores only.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import AttentionLayer, IndexedRows, LatentParts, TracedTensor
from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.sparse import reference

__all__ = ["IndexedRows", "attend_slots", "choose_tokens", "sparse_latent_attention"]

_choose_tokens = KernelDispatch("sparse.choose_tokens", reference.choose_tokens)
_attend_slots = KernelDispatch("sparse.attend_slots", reference.attend_slots)


def choose_tokens(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    rows_PS1W: torch.Tensor,
    pages_P: torch.Tensor,
    length: int,
    top_k: int,
) -> torch.Tensor:
    """The best tokens of the last rows of a request; see `reference`. Shape: int64 (T, K)."""
    given = q_THI, weights_TH, rows_PS1W, pages_P, length, top_k
    return _choose_tokens.on(rows_PS1W)(*given)


def attend_slots(
    q_TNC: torch.Tensor,
    rows_PS1W: torch.Tensor,
    slots_TK: torch.Tensor,
    layer: AttentionLayer,
    value_dim: int,
) -> torch.Tensor:
    """Attention of rows to the tokens in their slots. Shape: (T, N, C) -> (T, N, value_dim)."""
    return _attend_slots.on(q_TNC)(q_TNC, rows_PS1W, slots_TK, layer, value_dim)


def sparse_latent_attention(
    q: TracedTensor,
    kv: TracedTensor,
    parts: LatentParts,
    layer: AttentionLayer,
    index: IndexedRows | TracedTensor,
) -> tuple[TracedTensor, TracedTensor]:
    """`latent_attention` to selected tokens: (T, N value), and the selection, int32 (T, K).

    For tracing only: with tensors, the functions of `reference` run between `latent_heads` and
    `latent_output`.

    Args:
        q: (T, N (nope + rope_dim)).
        kv: (T, latent + rope_dim).
        parts: The layer's constants.
        layer: The attention heads over latents.
        index: The indexer's outputs, or the selection of an earlier layer.
    """
    return q.tracer.sparse_attention(q, kv, parts, layer, index)
