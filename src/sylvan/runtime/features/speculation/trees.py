"""Draft trees by confidence: the most likely continuations, of any length and width.

Shapes: F rows, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sylvan.protocol.arrays import IntArray

Choice = tuple[int, float]
"""A token and its log probability."""


class DraftNode(NamedTuple):
    """A draft.

    Attributes:
        token: Its id.
        parent: Index of the parent draft; -1: follows the newest token.
        score: Log probability of its path.
    """

    token: int
    parent: int
    score: float


def likeliest(logits_FV: torch.Tensor, drawn: IntArray, count: int) -> list[list[Choice]]:
    """Return the tokens of each row that are worth drafting, best first.

    The token sampled with the request's random number comes first, and counts as much as the
    most likely one: the model samples with the same number.
    """
    logs_FV = logits_FV.log_softmax(-1)
    found = logs_FV.topk(min(count, logs_FV.shape[1]))
    rows: list[list[Choice]] = []
    for tokens, logs, own in zip(
        found.indices.tolist(), found.values.tolist(), drawn.tolist(), strict=True
    ):
        others = [(token, log) for token, log in zip(tokens, logs, strict=True) if token != own]
        first = [(own, logs[0])] if own >= 0 else []
        possible = [choice for choice in [*first, *others] if choice[1] > -torch.inf]
        rows.append(possible[:count])
    return rows


def ranked(nodes: Sequence[DraftNode], limit: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents of the best drafts, parents first."""
    order = sorted(range(len(nodes)), key=lambda i: -nodes[i].score)[:limit]
    place = {-1: -1} | {node: at for at, node in enumerate(order)}
    return [nodes[i].token for i in order], [place[nodes[i].parent] for i in order]


def combined(levels: Sequence[Sequence[Choice]], limit: int) -> tuple[list[int], list[int]]:
    """Return the best paths through choices that are independent of each other."""
    nodes: list[DraftNode] = []
    ahead = [(-log, 0, -1, token) for token, log in (levels[0] if levels else ())]
    heapq.heapify(ahead)
    while ahead and len(nodes) < limit:
        cost, depth, parent, token = heapq.heappop(ahead)
        nodes.append(DraftNode(token, parent, -cost))
        if depth + 1 < len(levels):
            for following, log in levels[depth + 1]:
                heapq.heappush(ahead, (cost - log, depth + 1, len(nodes) - 1, following))
    return [node.token for node in nodes], [node.parent for node in nodes]
