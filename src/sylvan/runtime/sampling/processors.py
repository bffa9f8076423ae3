"""Logits processors: penalties, early stops, masks, bias, cleaning.

Each works in place on all rows at once and touches only rows that ask for it. Shapes: R rows to
sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.params import SamplingBatch

LogitsProcessor = Callable[[torch.Tensor, SamplingBatch], None]
"""(logits_RV float32, batch) -> None; changes the logits in place, each row by itself."""


def penalise(logits_RV: torch.Tensor, batch: SamplingBatch) -> None:
    """Apply frequency, presence and repetition penalties, which count output tokens only."""
    params = batch.params
    rows = np.flatnonzero(params.has_penalty[batch.slots])
    if not len(rows):
        return
    slots = batch.slots[rows]
    index = torch.from_numpy(rows).to(logits_RV.device)
    counts = torch.from_numpy(params.counts.of(slots)).to(logits_RV.device)
    frequency, presence, repetition = (
        torch.from_numpy(x[slots])[:, None].to(logits_RV.device)
        for x in (params.frequency, params.presence, params.repetition)
    )
    seen = counts > 0
    logits = logits_RV[index] - frequency * counts - presence * seen
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits_RV[index] = torch.where(seen, scaled, logits)


def forbid_early_stops(logits_RV: torch.Tensor, batch: SamplingBatch) -> None:
    """Mask out end-of-sequence and stop tokens before `min_new_tokens`."""
    params = batch.params
    early = np.flatnonzero(batch.positions < params.min_position[batch.slots])
    if not len(early):
        return
    stops = [params.stops[slot] for slot in batch.slots[early]]
    rows = np.repeat(early, [len(s) for s in stops])
    ids = np.concatenate(stops).astype(np.int64)
    _at(logits_RV, rows, ids, float("-inf"))


def add_bias(logits_RV: torch.Tensor, batch: SamplingBatch) -> None:
    """Add `logit_bias`."""
    biased = np.flatnonzero(batch.params.has_bias[batch.slots])
    if not len(biased):
        return
    pairs = [batch.params.bias[slot] for slot in batch.slots[biased]]
    rows = np.repeat(biased, [len(ids) for ids, _ in pairs])
    ids = np.concatenate([ids for ids, _ in pairs]).astype(np.int64)
    values = torch.from_numpy(np.concatenate([values for _, values in pairs]))
    index = torch.from_numpy(rows).to(logits_RV.device), torch.from_numpy(ids).to(logits_RV.device)
    logits_RV[index] += values.to(logits_RV.device)


def clean(logits_RV: torch.Tensor, batch: SamplingBatch) -> None:
    """Make NaN impossible to sample, and infinity the largest finite number.

    Minus infinity stays, because it masks out a token.
    """
    torch.nan_to_num(
        logits_RV,
        nan=float("-inf"),
        posinf=torch.finfo(torch.float32).max,
        neginf=float("-inf"),
        out=logits_RV,
    )


def apply_masks(logits_RV: torch.Tensor, masks: Masks) -> None:
    """Mask out the ids that a constraint forbids."""
    bits = np.ascontiguousarray(masks.bits).view(np.uint8)
    allowed = np.unpackbits(bits, axis=1, count=logits_RV.shape[1], bitorder="little")
    forbidden = torch.from_numpy(allowed == 0).to(logits_RV.device)
    if len(masks.rows) == len(logits_RV):
        logits_RV.masked_fill_(forbidden, float("-inf"))
        return
    index = torch.from_numpy(masks.rows.astype(np.int64)).to(logits_RV.device)
    logits_RV[index] = logits_RV[index].masked_fill(forbidden, float("-inf"))


def _at(logits_RV: torch.Tensor, rows: np.ndarray, ids: np.ndarray, value: float) -> None:
    index = tuple(torch.from_numpy(x).to(logits_RV.device) for x in (rows, ids))
    logits_RV[index] = value
