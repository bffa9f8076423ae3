"""All-to-all: each expert output goes only to the rank that sums it, not to all ranks.

Every rank has all rows of a step, and sums an equal share of them. All ranks know which rank has
which expert, so each knows what it sends and receives without exchanging counts.

Shapes: T rows, K experts of a row, P pairs of a row and one of its experts, D columns, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import ExpertRanks


@dataclass(frozen=True, slots=True)
class _PairRoutes:
    """For all T K pairs, in order: the rank that computes it, and the rank that sums it."""

    source: torch.Tensor
    target: torch.Tensor
    max_pairs: int  # most pairs that a rank sends to another

    def of(self, source: int, target: int) -> torch.Tensor:
        """Indices of the pairs that one rank sends to another."""
        return ((self.source == source) & (self.target == target)).nonzero().flatten()


def sum_by_owner(
    expert_ranks: ExpertRanks,
    ids_TK: torch.Tensor,
    outputs_PD: torch.Tensor,
    pairs: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums of all rows, each computed by one rank in the order of the experts.

    Args:
        expert_ranks: Which rank has which expert; each rank has whole experts.
        ids_TK: The experts of each row.
        outputs_PD: Outputs of this rank's pairs.
        pairs: Indices of these pairs, int64.
        weights_TK: Routing weight of each pair, float32.

    Returns: (T, D) in the dtype of the outputs, on every rank.
    """
    ranks, (num_rows, top_k), columns = expert_ranks.ranks, ids_TK.shape, outputs_PD.shape[1]
    each = -(-num_rows // ranks.size)
    routes = _pair_routes(expert_ranks, ids_TK, each)
    place = torch.empty(num_rows * top_k, dtype=torch.int64, device=pairs.device)
    place[pairs] = torch.arange(len(pairs), device=pairs.device)
    sent = outputs_PD.new_zeros(ranks.size, routes.max_pairs, columns)
    for target in range(ranks.size):
        own = routes.of(ranks.rank, target)
        sent[target, : len(own)] = outputs_PD[place[own]]
    found = ranks.all_to_all(sent)
    first = min(ranks.rank * each, num_rows)
    mine = slice(first, min(first + each, num_rows))
    got = outputs_PD.new_zeros((mine.stop - first) * top_k, columns)
    for source in range(ranks.size):
        own = routes.of(source, ranks.rank)
        got[own - first * top_k] = found[source, : len(own)]
    weighted = got.float().unflatten(0, (-1, top_k)) * weights_TK[mine, :, None]
    sums = outputs_PD.new_zeros(each, columns)
    sums[: mine.stop - first] = weighted.sum(1).to(outputs_PD.dtype)
    return ranks.all_gather(sums).flatten(0, 1)[:num_rows]


def _pair_routes(expert_ranks: ExpertRanks, ids_TK: torch.Tensor, each: int) -> _PairRoutes:
    size = expert_ranks.ranks.size
    source = (expert_ranks.slots(ids_TK) // expert_ranks.per_group).flatten()
    rows = torch.arange(len(ids_TK), device=ids_TK.device) // each
    target = rows.repeat_interleave(ids_TK.shape[1])
    counts = (source * size + target).bincount(minlength=size * size)
    return _PairRoutes(source, target, int(counts.max()))
