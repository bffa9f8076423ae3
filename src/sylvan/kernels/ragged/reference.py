"""The definition of correct, in PyTorch.

Shapes: T rows, N query heads, K key/value heads, H head dim, S rows of one text.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional as F

from sylvan.kernels.api import AttentionLayer


def ragged_attention(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    starts: list[int],
    layer: AttentionLayer,
    ends_T: torch.Tensor | None = None,
) -> torch.Tensor:
    assert layer.softcap is None, "no encoder caps its scores"
    assert layer.sinks is None, "no encoder has sinks"
    out_TNH = q_TNH.new_empty(len(q_TNH), layer.num_heads, layer.value_dim)
    masks: dict[int, torch.Tensor | None] = {}
    for start, stop in pairwise(starts):
        length = stop - start
        if length not in masks:
            masks[length] = _mask(length, layer, q_TNH.device)
        seen = length if ends_T is None else int(ends_T[start])
        q = q_TNH[start:stop].transpose(0, 1)[None]
        k, v = (x[start : start + seen].transpose(0, 1)[None] for x in (k_TKH, v_TKH))
        mask = masks[length]
        mask = mask if mask is None else mask[:, :seen]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=True
        )
        out_TNH[start:stop] = out[0].transpose(0, 1)
    return out_TNH.flatten(1)


def _mask(length: int, layer: AttentionLayer, device: torch.device) -> torch.Tensor | None:
    """True where a token sees another; None: everywhere. Shape: (S, S)."""
    if layer.window is None or layer.window >= length:
        return None
    position = torch.arange(length, device=device)
    return (position[:, None] - position).abs() < layer.window
