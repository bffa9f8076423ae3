"""Latent attention to the tokens that an index chooses (DeepSeek-V3.2-Exp's technical report).

The index has a few small heads, whose scores are added; the best tokens take part in attention. Of
equal scores the earlier token is better, so that a choice depends on nothing but the scores.
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
    """As `latent_attention`, to chosen tokens: (T, N value), and the choice, int32 (T, K).

    Recorded only: on tensors the functions of `reference` stand between `latent_heads` and
    `latent_output`.

    Args:
        q: (T, N (nope + turning)).
        kv: (T, latent + turning).
        parts: The layer's constants.
        layer: Of the heads over latents.
        index: By which tokens are chosen, or what was chosen for a layer before.
    """
    return q.tracer.sparse_attention(q, kv, parts, layer, index)
