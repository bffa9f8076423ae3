"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) as attention with one wide key head.

With the up-projections absorbed into queries and outputs, the KV of a token is its latent vector
and one rotated key part. All query heads attend to it; its first columns are the value.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import AttentionLayer, LatentParts, LatentShape, TracedTensor
from sylvan.kernels.latent import reference

__all__ = ["LatentParts", "LatentShape", "latent_attention", "latent_heads", "latent_output"]


def latent_attention(
    q: TracedTensor, kv: TracedTensor, parts: LatentParts, layer: AttentionLayer
) -> TracedTensor:
    """Latent attention as one op: heads, paged attention and output. Shape: (T, N value).

    For tracing only: with tensors, an attention backend runs between `latent_heads` and
    `latent_output`.
    """
    return q.tracer.latent_attention(q, kv, parts, layer)


def latent_heads(
    q: torch.Tensor, kv: torch.Tensor, parts: LatentParts, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return absorbed queries (T, N, latent + rope_dim) and the key head (T, 1, latent + rope_dim).

    Args:
        q: (T, N (nope + rope_dim)).
        kv: (T, latent + rope_dim), before norm and rotation.
        parts: The layer's constants.
        positions_T: Positions of the rows.
    """
    return reference.latent_heads(q, kv, parts, positions_T)


def latent_output(out_TNC: torch.Tensor, parts: LatentParts) -> torch.Tensor:
    """Project attention results from latents to value heads: (T, N, latent) -> (T, N value)."""
    return reference.latent_output(out_TNC, parts)
