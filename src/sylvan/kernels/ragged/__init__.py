"""Attention of texts over themselves, in both directions and without a KV cache."""

from __future__ import annotations

import torch

from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.ragged import reference


def ragged_attention(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    starts: list[int],
    layer: AttentionLayer,
    ends_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each text attends to itself alone. Shape: (T, N H).

    Text r has rows starts[r] to starts[r + 1]. With a window a token sees those fewer than
    `layer.window` places away, before and after it. With ends, a row sees only the tokens of its
    text before its end, which is the same for all rows of a text.
    """
    return reference.ragged_attention(q_TNH, k_TKH, v_TKH, starts, layer, ends_T)
