"""The definition of correct, in PyTorch; attention in float32.

Shapes: T rows, N heads, H columns of a head, S tokens, E entries, K selected ones, J heads of the
index, I their columns.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import Rope


def rotate_columns(
    x_TNH: torch.Tensor, positions_T: torch.Tensor, rope: Rope, *, inverse: bool = False
) -> torch.Tensor:
    """Rotate adjacent pairs of the last columns of heads, in float32; `inverse`: back."""
    width = rope.cos_sin.shape[1]
    passing, rotary = x_TNH[..., :-width], x_TNH[..., -width:]
    cos, sin = rope.cos_sin[positions_T.long(), None].chunk(2, -1)
    sin = -sin if inverse else sin
    a, b = rotary[..., ::2], rotary[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((passing, pairs.flatten(-2)), -1)


def unit_heads(q_TNH: torch.Tensor, eps: float) -> torch.Tensor:
    """Heads divided by their root mean square."""
    return q_TNH * torch.rsqrt(q_TNH.square().mean(-1, keepdim=True) + eps)


def choose_entries(
    q_TJI: torch.Tensor,
    weight_TJ: torch.Tensor,
    key_EI: torch.Tensor,
    hidden_TE: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The best entries of each row, best first; ties: the earlier. Shape: (T, K)."""
    score_TE = ((q_TJI @ key_EI.T).relu() * weight_TJ[..., None]).sum(1)
    score_TE = score_TE.masked_fill(hidden_TE, float("-inf"))
    return score_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def attend(
    q_TNH: torch.Tensor,
    near: tuple[torch.Tensor, torch.Tensor],
    far: tuple[torch.Tensor, torch.Tensor] | None,
    sinks_N: torch.Tensor,
) -> torch.Tensor:
    """Attention to keys that are also values.

    Args:
        q_TNH: Queries.
        near: Keys of tokens (S, H), and which of them rows do not see (T, S).
        far: Entries (T or 1, K, H), and which of them rows do not see (T, K); None: none.
        sinks_N: Logits that take part in the softmax.

    Returns: (T, N, H).
    """
    (key_SH, hidden_TS), scale = near, q_TNH.shape[-1] ** -0.5
    score = torch.einsum("tnh,sh->tns", q_TNH, key_SH) * scale
    scores = [score.masked_fill(hidden_TS[:, None], float("-inf"))]
    sink_TN1 = sinks_N.float()[None, :, None].expand(len(q_TNH), -1, 1)
    if far is None:
        shares = torch.cat((*scores, sink_TN1), -1).softmax(-1)
        return torch.einsum("tns,sh->tnh", shares[..., :-1], key_SH)
    entry_TKH, hidden_TK = far[0].expand(len(q_TNH), -1, -1), far[1]
    score = torch.einsum("tnh,tkh->tnk", q_TNH, entry_TKH) * scale
    scores.append(score.masked_fill(hidden_TK[:, None], float("-inf")))
    shares = torch.cat((*scores, sink_TN1), -1).softmax(-1)
    near_TNS, far_TNK = shares[..., : len(key_SH)], shares[..., len(key_SH) : -1]
    out_TNH = torch.einsum("tns,sh->tnh", near_TNS, key_SH)
    return out_TNH + torch.einsum("tnk,tkh->tnh", far_TNK, entry_TKH)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """A product for each group of columns, in the dtype of x. Shape: (T, G F) to (T, G R)."""
    x_TGF, weight_GRF = x.unflatten(-1, (groups, -1)), weight.unflatten(0, (groups, -1))
    return torch.einsum("tgf,grf->tgr", x_TGF, weight_GRF).flatten(1)
