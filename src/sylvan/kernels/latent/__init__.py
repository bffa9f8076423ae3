"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) as attention with one wide key head.

With the up-projections absorbed into queries and outputs, what is kept of a token is its latent
vector and one turned key part; all query heads look at it, and its first columns are the value.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import Unsupported, Value, X
from sylvan.kernels.latent import reference
from sylvan.kernels.latent.parts import LatentParts, LatentShape

__all__ = ["LatentParts", "LatentShape", "latent_heads", "latent_output"]


def latent_heads(
    q: X, kv: X, parts: LatentParts, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries (T, N, latent + turning) and the one key head (T, 1, latent + turning).

    Args:
        q: (T, N (nope + turning)).
        kv: (T, latent + turning), before norm and turning.
        parts: The layer's constants.
        positions_T: Positions of the rows.
    """
    if isinstance(q, Value) or isinstance(kv, Value):
        raise Unsupported("latent attention")
    return reference.latent_heads(q, kv, parts, positions_T)


def latent_output(out_TNC: torch.Tensor, parts: LatentParts) -> torch.Tensor:
    """Attended latents to value heads. Shape: (T, N, latent) -> (T, N value)."""
    return reference.latent_output(out_TNC, parts)
