"""Draws one token per row: softmax, top-k, top-p, min-p, then inverse transform sampling.

All samplers implement this definition, for each row independently. Let p be the probabilities, and
sort ids by descending logit, ties by ascending id. top-k keeps the first k ids. top-p keeps an id
if the probabilities before it sum to less than top_p; with min-p as well, they are renormalised
after top-k first. min-p keeps ids with p >= min_p * max(p). Given u in [0, 1) from (seed, sample,
position), the draw is the first id, in id order, at which the kept probabilities sum to more than u
times their total. (GPUs sort by p, in which logits may tie at temperatures of many thousands.)

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.runtime.sampling.params import NO_TOP_K, SamplingBatch, SamplingSlots
from sylvan.runtime.sampling.philox import uniform

CANDIDATES = 1024
"""Number of most likely ids that are tried before a row's whole vocabulary is sorted.

It is constant, because a number that depends on the batch would make rows depend on each other.
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """Parameters of rows that drop improbable tokens, as columns (R, 1)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def rows(self, chosen: torch.Tensor) -> Filter:
        """Select the parameters of some rows."""
        return Filter(self.top_k[chosen], self.top_p[chosen], self.min_p[chosen])


def draw(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw token ids, int64 (R,), from logits to which only temperature has not been applied."""
    params, slots = batch.params, batch.slots
    device = logits_RV.device
    out_R = logits_RV.argmax(-1)  # ties: the lowest id
    random = np.flatnonzero(~params.greedy[slots])
    if not len(random):
        return out_R
    mine = slots[random]
    index = torch.from_numpy(random).to(device)
    temperature = torch.from_numpy(params.temperature[mine])[:, None].to(device)
    logits = logits_RV[index]
    # Subtract the maximum first, because a large logit over a tiny temperature would overflow.
    probs_RV = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    u = uniform(params.seed[mine], params.sample[mine], batch.positions[random])
    u_R = torch.from_numpy(u).to(device)
    out = torch.empty_like(index)
    dropping = filtered(params, mine)
    plain = torch.from_numpy(np.flatnonzero(~dropping)).to(device)
    if len(plain):
        out[plain] = _invert(probs_RV[plain], u_R[plain])
    chosen = np.flatnonzero(dropping)
    if len(chosen):
        rows = torch.from_numpy(chosen).to(device)
        columns = (
            torch.from_numpy(x[mine[chosen]])[:, None].to(device)
            for x in (params.top_k, params.top_p, params.min_p)
        )
        out[rows] = _draw_filtered(logits[rows], probs_RV[rows], u_R[rows], Filter(*columns))
    out_R[index] = out
    return out_R


def filtered(params: SamplingSlots, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each of these slots has top-k, top-p or min-p; meaningless for greedy ones."""
    return (
        (params.top_k[slots] < NO_TOP_K) | (params.top_p[slots] < 1.0) | (params.min_p[slots] > 0.0)
    )


def _invert(probs_RC: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """First column where the running sum exceeds u times the total. Shape: (R,)."""
    sums_RC = probs_RC.cumsum(-1, dtype=torch.float64)
    total_R = sums_RC[:, -1]
    below = torch.nextafter(total_R, torch.zeros_like(total_R))
    target_R = torch.minimum(u_R * total_R, below)
    place_R = torch.searchsorted(sums_RC, target_R[:, None], right=True)[:, 0]
    return place_R.clamp_max(probs_RC.shape[1] - 1)  # rows of NaN; the sampler reports them


def _draw_filtered(
    logits_RV: torch.Tensor, probs_RV: torch.Tensor, u_R: torch.Tensor, filters: Filter
) -> torch.Tensor:
    size = min(CANDIDATES, probs_RV.shape[1])
    out, sure = _draw_among(logits_RV, probs_RV, u_R, filters, size)
    unsure = torch.nonzero(~sure)[:, 0]
    if len(unsure):
        whole = probs_RV.shape[1]
        part = logits_RV[unsure], probs_RV[unsure], u_R[unsure], filters.rows(unsure)
        out[unsure], _ = _draw_among(*part, whole)
    return out


def _draw_among(
    logits_RV: torch.Tensor,
    probs_RV: torch.Tensor,
    u_R: torch.Tensor,
    filters: Filter,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `size` most likely ids; also return in which rows these were enough."""
    x_RC, ids_RC = _ordered(logits_RV, size)
    p_RC = probs_RV.gather(-1, ids_RC)
    kept_RC = _keep(p_RC, filters)
    # ---- a row has enough candidates if neither the last one, nor an id beyond them, is kept, and
    #      if top-p, where it is a share of the first k ids, finds these among the candidates
    sure = torch.ones(len(p_RC), dtype=torch.bool, device=p_RC.device)
    if size < probs_RV.shape[1]:
        ties = x_RC == x_RC[:, -1:]
        beyond = (filters.min_p > 0) & (filters.top_p < 1) & (filters.top_k > size)
        sure = ~((kept_RC & ties).any(-1) | beyond[:, 0])
    by_id = ids_RC.argsort(-1)
    kept = torch.where(kept_RC, p_RC, 0.0).gather(-1, by_id)
    place = _invert(kept, u_R)
    return ids_RC.gather(-1, by_id).gather(-1, place[:, None])[:, 0], sure


def _ordered(logits_RV: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` largest logits of each row and their ids, descending; ties by ascending id."""
    if size == logits_RV.shape[1]:
        return torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    x_RC, ids_RC = logits_RV.topk(size, -1, sorted=False)
    by_id = ids_RC.argsort(-1)
    x_RC, order = torch.sort(x_RC.gather(-1, by_id), dim=-1, descending=True, stable=True)
    return x_RC, ids_RC.gather(-1, by_id).gather(-1, order)


def _keep(p_RC: torch.Tensor, filters: Filter) -> torch.Tensor:
    rank = torch.arange(p_RC.shape[1], device=p_RC.device)
    first_k = rank < filters.top_k
    before = p_RC.cumsum(-1, dtype=torch.float64) - p_RC
    within = torch.where(first_k, p_RC, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    whole = torch.where(filters.min_p > 0, within, torch.ones_like(within))
    return first_k & (before < filters.top_p * whole) & (p_RC >= filters.min_p * p_RC[:, :1])
