"""Routing: selects the experts of each row, and their weights.

Sources: DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437) for groups and the bias that
balances, SparseMixer (arXiv:2409.12136) for Phi-MoE.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sylvan.kernels.api import Routing


def route(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert numbers, ascending in each row, and their weights. Shapes: (T, K), (T, K) float32."""
    logits_TE = logits_TE.float()
    if routing.ids is not None:
        ids_TK = routing.ids.long()
        weights_TK = _shares(_scores(logits_TE, routing), ids_TK, routing)
    elif routing.scores == "sparsemixer":
        ids_TK, weights_TK = _sparse_mixer(logits_TE, routing)
    else:
        ids_TK, weights_TK = _top_k(logits_TE, routing)
    ids_TK, order_TK = ids_TK.sort(-1)
    return ids_TK, weights_TK.gather(-1, order_TK)


def _top_k(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    if routing.scores == "softmax_chosen":
        best_TK, ids_TK = logits_TE.topk(routing.top_k, -1)
        return ids_TK, best_TK.softmax(-1) * routing.scale
    scores_TE = _scores(logits_TE, routing)
    ranks_TE = scores_TE if routing.bias is None else scores_TE + routing.bias.float()
    if routing.groups > 1:
        ranks_TE = _keep_groups(ranks_TE, routing)
    ids_TK = ranks_TE.topk(routing.top_k, -1).indices
    return ids_TK, _shares(scores_TE, ids_TK, routing)


def _scores(logits_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
    if routing.scores == "sqrt_softplus":
        return functional.softplus(logits_TE).sqrt()
    return logits_TE.sigmoid() if routing.scores == "sigmoid" else logits_TE.softmax(-1)


def _shares(scores_TE: torch.Tensor, ids_TK: torch.Tensor, routing: Routing) -> torch.Tensor:
    weights_TK = scores_TE.gather(-1, ids_TK)
    if routing.normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * routing.scale


def _keep_groups(ranks_TE: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Set the ranking scores of experts outside the best groups to minus infinity."""
    grouped = ranks_TE.unflatten(-1, (routing.groups, -1))
    count = 1 if routing.group_rank == "best" else 2
    best = grouped.topk(count, -1).values.sum(-1)
    kept = torch.zeros_like(best).scatter_(-1, best.topk(routing.kept_groups, -1).indices, 1.0)
    return grouped.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(-2)


def _sparse_mixer(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer: pick the best expert, then the next; weigh each against scores close to it."""
    ids: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    left_TE = logits_TE
    for _ in range(routing.top_k):
        best, index = left_TE.max(-1, keepdim=True)
        scale = torch.maximum(logits_TE.abs(), best)
        far = (best - logits_TE) / scale > 2 * routing.jitter
        chosen = left_TE.masked_fill(far, float("-inf")).softmax(-1).gather(-1, index)
        ids.append(index)
        weights.append(chosen)
        left_TE = left_TE.scatter(-1, index, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)
