"""The definition of correct, in PyTorch.

Shapes: T rows, N heads, C latent and rotary columns, H indexer heads, I their columns, S
tokens of a request, K selected ones.
"""

from __future__ import annotations

import torch

from sylvan.kernels.api import AttentionLayer

_MAX_NUMBERS = 1 << 24  # approximate limit of numbers in an intermediate tensor


def choose(
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys_SI: torch.Tensor, first: int, top_k: int
) -> torch.Tensor:
    """Select the best tokens of each row among those up to its own, ascending. Shape: int64 (T, K).

    Ties go to the earlier token.

    Args:
        q_THI: Queries of the indexer's heads.
        weights_TH: Weights of these heads.
        keys_SI: Indexer keys of all tokens.
        first: Position of the first row; it sees at least `top_k` tokens.
        top_k: K.
    """
    keys, chosen = keys_SI.float().T, list[torch.Tensor]()
    step = max(1, _MAX_NUMBERS // (q_THI.shape[1] * len(keys_SI)))
    for start in range(0, len(q_THI), step):
        rows = slice(start, start + step)
        score_TS = torch.einsum("ths,th->ts", (q_THI[rows] @ keys).relu(), weights_TH[rows])
        own = first + start + torch.arange(len(score_TS), device=keys.device)[:, None]
        later = torch.arange(len(keys_SI), device=keys.device) > own
        seen_TS = score_TS.masked_fill(later, float("-inf"))
        order_TS = seen_TS.sort(dim=-1, descending=True, stable=True).indices
        chosen.append(order_TS[:, :top_k].sort(-1).values)
    return torch.cat(chosen)


def choose_tokens(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    rows_PS1W: torch.Tensor,
    pages_P: torch.Tensor,
    length: int,
    top_k: int,
) -> torch.Tensor:
    """`choose` for the last rows of a request, whose keys are the last columns of rows in pages.

    Args:
        q_THI: Queries of the indexer heads.
        weights_TH: Their weights.
        rows_PS1W: All pages of the layer.
        pages_P: Page table of the request.
        length: Tokens of the request, including these rows.
        top_k: K.
    """
    width = q_THI.shape[-1]
    keys_SI = rows_PS1W[pages_P, :, 0, rows_PS1W.shape[-1] - width :].flatten(0, 1)[:length]
    return choose(q_THI, weights_TH, keys_SI, length - len(q_THI), top_k)


def attend_slots(
    q_TNC: torch.Tensor,
    rows_PS1C: torch.Tensor,
    slots_TK: torch.Tensor,
    layer: AttentionLayer,
    value_dim: int,
) -> torch.Tensor:
    """Attention of each row to the tokens in its slots, in float32. Shape: (T, N, value_dim)."""
    out = q_TNC.new_empty(*q_TNC.shape[:2], value_dim)
    kept, columns = rows_PS1C.flatten(0, 1)[:, 0], q_TNC.shape[-1]
    step = max(1, _MAX_NUMBERS // (slots_TK.shape[1] * columns))
    for start in range(0, len(q_TNC), step):
        rows = slice(start, start + step)
        k_TKC = kept[slots_TK[rows], :columns].float()
        score_TNK = q_TNC[rows].float() @ k_TKC.transpose(1, 2) * layer.scale
        out[rows] = (score_TNK.softmax(-1) @ k_TKC[..., :value_dim]).to(out.dtype)
    return out
