"""Latent attention to the tokens that an indexer selects (DeepSeek-V3.2-Exp's technical report).

The indexer adds the scores of a few small heads and selects the best tokens. Ties go to the earlier
token, so the selection depends on the scores only.
"""

from __future__ import annotations

from sylvan.kernels.api import AttentionLayer, IndexedRows, LatentParts, TracedTensor

__all__ = ["IndexedRows", "sparse_latent_attention"]


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
        q: (T, N (nope + turning)).
        kv: (T, latent + turning).
        parts: The layer's constants.
        layer: The attention heads over latents.
        index: The indexer's outputs, or the selection of an earlier layer.
    """
    return q.tracer.sparse_attention(q, kv, parts, layer, index)
