"""Sampling without waiting for the device: the same operations for rows of any parameters.

`draw` defines the results. Shapes: R rows, V vocabulary, C counts, M masks, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sylvan.runtime.sampling.params import NO_TOP_K


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRowParams:
    """Sampling parameters of the rows, on the device, each (R,)."""

    greedy: torch.Tensor  # bool
    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int32; at least the vocabulary size: off
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    seed: torch.Tensor  # int64; with sample and position, the key of a row's random number
    sample: torch.Tensor
    position: torch.Tensor
    # float64 in [0, 1): the random number, for backends that cannot generate it
    uniform: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of output tokens. `count_rows` int32 (R,) are rows of `counts`, or -1."""

    counts: torch.Tensor  # float32 (C, V)
    count_rows: torch.Tensor
    frequency: torch.Tensor  # float32 (R,), as are the next
    presence: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, slots=True)
class MaskBits:
    """Token masks: `rows` int32 (R,) are rows of `bits` int32 (M, words), or -1."""

    bits: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """Values added to single logits; minus infinity forbids one."""

    rows: torch.Tensor  # int32 (E,)
    ids: torch.Tensor  # int32 (E,)
    values: torch.Tensor  # float32 (E,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLogitEdits:
    """Edits of logits before sampling, in this order."""

    penalties: Penalties | None = None
    masks: MaskBits | None = None
    entries: Entries | None = None


class DeviceSampling(Protocol):
    """Sampling kernels. `generates_random`: they generate the random numbers themselves."""

    generates_random: bool

    def edit(self, logits_RV: torch.Tensor, edits: DeviceLogitEdits) -> None:
        """Change logits in place."""
        ...

    def draw(
        self, logits_RV: torch.Tensor, rows: DeviceRowParams | None, *, filtered: bool = True
    ) -> torch.Tensor:
        """Draw ids int32 (R,), -1 where no token is valid. `rows` None: all rows are greedy.

        `filtered` False: only greedy rows have top-k, top-p or min-p.
        """
        ...


class TorchSampling:
    """PyTorch on any device; slow, because it sorts the vocabulary."""

    generates_random = False

    def edit(self, logits_RV: torch.Tensor, edits: DeviceLogitEdits) -> None:
        if (p := edits.penalties) is not None:
            _penalise(logits_RV, p)
        if (masks := edits.masks) is not None:
            shifts = torch.arange(32, device=logits_RV.device, dtype=torch.int32)
            bits = (masks.bits[masks.rows.clamp_min(0).long()][..., None] >> shifts) & 1
            allowed = bits.flatten(1)[:, : logits_RV.shape[1]].bool() | (masks.rows < 0)[:, None]
            logits_RV.masked_fill_(~allowed, float("-inf"))
        if (entries := edits.entries) is not None:
            index = entries.rows.long(), entries.ids.long()
            logits_RV.index_put_(index, entries.values, accumulate=True)

    def draw(
        self, logits_RV: torch.Tensor, rows: DeviceRowParams | None, *, filtered: bool = True
    ) -> torch.Tensor:
        """Sort the vocabulary of every row, and draw from it."""
        del filtered
        clean_RV = cleaned(logits_RV)
        best_R, ids_R = clean_RV.max(-1)
        if rows is not None:
            ids_R = torch.where(rows.greedy, ids_R, _random(clean_RV, best_R, rows))
        possible = best_R > float("-inf")
        return torch.where(possible, ids_R, torch.full_like(ids_R, -1)).int()


def cleaned(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return a copy in which NaN is never sampled, and infinity is the largest finite number."""
    most = torch.finfo(torch.float32).max
    return logits_RV.nan_to_num(nan=float("-inf"), posinf=most, neginf=float("-inf"))


def _penalise(logits_RV: torch.Tensor, p: Penalties) -> None:
    counts = p.counts[p.count_rows.clamp_min(0).long()]
    seen = (counts > 0) & (p.count_rows >= 0)[:, None]
    less = logits_RV - p.frequency[:, None] * counts - p.presence[:, None]
    scaled = torch.where(less > 0, less / p.repetition[:, None], less * p.repetition[:, None])
    logits_RV.copy_(torch.where(seen, scaled, logits_RV))


def _random(clean_RV: torch.Tensor, best_R: torch.Tensor, rows: DeviceRowParams) -> torch.Tensor:
    scaled = (clean_RV - best_R[:, None].clamp_min(torch.finfo(torch.float32).min)) / (
        rows.temperature[:, None]
    )
    probs_RV = torch.softmax(scaled, -1)
    sorted_RV, order = torch.sort(probs_RV, dim=-1, descending=True, stable=True)
    kept_RV = torch.zeros_like(probs_RV).scatter_(
        -1, order, torch.where(_keep(sorted_RV, rows), sorted_RV, 0.0)
    )
    sums = kept_RV.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    target = torch.minimum(rows.uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return place.clamp_max(probs_RV.shape[1] - 1)


def _keep(p_RV: torch.Tensor, rows: DeviceRowParams) -> torch.Tensor:
    """Whether each of the sorted ids passes the row's top-k, top-p and min-p."""
    rank = torch.arange(p_RV.shape[1], device=p_RV.device)
    top_k, top_p, min_p = (x[:, None] for x in (rows.top_k, rows.top_p, rows.min_p))
    first_k = rank < top_k
    before = p_RV.cumsum(-1, dtype=torch.float64) - p_RV
    within = torch.where(first_k, p_RV, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    whole = torch.where(min_p > 0, within, torch.ones_like(within))
    kept = first_k & (before < top_p * whole) & (p_RV >= min_p * p_RV[:, :1])
    plain = (top_k >= NO_TOP_K) & (top_p >= 1) & (min_p <= 0)
    return kept | plain
