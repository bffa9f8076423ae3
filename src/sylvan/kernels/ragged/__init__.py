"""Bidirectional attention within each text of a step, without a KV cache."""

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
    """Attend within each text. Shape: (T, N H).

    Text r has rows starts[r] to starts[r + 1]. With a window, a token sees the tokens less than
    `layer.window` positions before and after it. With ends, a row sees only the tokens of its text
    before its end, which is the same for all rows of a text.
    """
    return reference.ragged_attention(q_TNH, k_TKH, v_TKH, starts, layer, ends_T)
