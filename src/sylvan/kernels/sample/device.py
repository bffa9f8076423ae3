"""Inputs and outputs of sampling on a device; no Triton here.

Shapes: R rows, V vocabulary, C rows of counts, M masks, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Parameters of the rows, tensors (R,) on the device of the logits.

    `greedy` bool; `temperature`, `top_p`, `min_p` float32; `top_k` int32, the vocabulary or more
    means all; `seed`, `sample` and `position` int64: the key of the row's random number.
    """

    greedy: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sample: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Edits of logits before a draw, in this order; each of the three may be absent.

    Penalties: `counts` float32 (C, V) of generated ids, the row of a request's counts or -1 in
    `count_rows` int32 (R,), and float32 (R,) strengths. Masks: bit i of a row of `mask_bits` int32
    (M, at least ceil(V / 32)) allows id i; `mask_rows` int32 (R,): a mask or -1. Entries: float32
    `entry_values` (E,) are added at (`entry_rows`, `entry_ids`), both int32; minus infinity
    forbids. An id may occur twice in a row only if one of the two entries forbids it.
    """

    counts: torch.Tensor | None = None
    count_rows: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    mask_bits: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None
    entry_rows: torch.Tensor | None = None
    entry_ids: torch.Tensor | None = None
    entry_values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """`ids` int32 (R,), -1 if no token is valid, and float32 (R,) log probabilities.

    `logsumexp` (R,) is that of logits / temperature; an id's log probability is its scaled logit
    minus `logsumexp`.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    logsumexp: torch.Tensor
