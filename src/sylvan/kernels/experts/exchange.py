"""Exchanges between ranks with different experts, each of which sums an equal share of the rows.

All-to-all: each expert output goes only to the rank that sums it. Every rank has all rows of a
step, and all ranks know which rank has which expert, so each knows what it sends and receives
without exchanging counts. Dispatch and combine: each rank sends its share of the rows to the ranks
of their experts, and gets back a sum from each (`RowDispatcher`).

Shapes: T rows, K experts of a row, P pairs of a row and one of its experts, D columns, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from sylvan.kernels.api import DispatchedRows, ExpertRanks


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
    mine = _own_rows(ranks.rank, each, num_rows)
    first = mine.start
    got = outputs_PD.new_zeros((mine.stop - first) * top_k, columns)
    for source in range(ranks.size):
        own = routes.of(source, ranks.rank)
        got[own - first * top_k] = found[source, : len(own)]
    weighted = got.float().unflatten(0, (-1, top_k)) * weights_TK[mine, :, None]
    sums = outputs_PD.new_zeros(each, columns)
    sums[: mine.stop - first] = weighted.sum(1).to(outputs_PD.dtype)
    return ranks.all_gather(sums).flatten(0, 1)[:num_rows]


def sum_dispatched(
    expert_ranks: ExpertRanks,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    compute: Callable[[DispatchedRows], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sums of all rows, of which each rank dispatches an equal share.

    Args:
        expert_ranks: Which rank has which expert, and the dispatcher.
        x_TD: All rows, the same on every rank.
        ids_TK: Their experts.
        weights_TK: Routing weights, float32.
        compute: Sums of the experts of this rank for rows that came, in the dtype of x: (R, D).

    Returns:
        (T, D), the same on every rank.
    """
    ranks, num_rows, dispatcher = expert_ranks.ranks, len(x_TD), expert_ranks.dispatcher
    assert dispatcher is not None
    each = -(-num_rows // ranks.size)
    mine = _own_rows(ranks.rank, each, num_rows)
    # all ranks send `each` rows: the last ones pad with rows without experts
    below = (0, 0, 0, each - (mine.stop - mine.start))
    rows = dispatcher.dispatch(
        functional.pad(x_TD[mine], below),
        functional.pad(expert_ranks.slots(ids_TK)[mine], below, value=-1),
        functional.pad(weights_TK[mine], below),
        expert_ranks.num_slots,
    )
    sums = dispatcher.combine(compute(rows), rows.handle)
    return ranks.all_gather(sums).flatten(0, 1)[:num_rows]


def _own_rows(rank: int, each: int, num_rows: int) -> slice:
    """The rows that a rank sums: `each`, or those that are left."""
    first = min(rank * each, num_rows)
    return slice(first, min(first + each, num_rows))


def _pair_routes(expert_ranks: ExpertRanks, ids_TK: torch.Tensor, each: int) -> _PairRoutes:
    size = expert_ranks.ranks.size
    source = (expert_ranks.slots(ids_TK) // expert_ranks.per_group).flatten()
    rows = torch.arange(len(ids_TK), device=ids_TK.device) // each
    target = rows.repeat_interleave(ids_TK.shape[1])
    counts = (source * size + target).bincount(minlength=size * size)
    return _PairRoutes(source, target, int(counts.max()))
