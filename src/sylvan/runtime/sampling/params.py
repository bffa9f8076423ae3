"""Sampling parameters of the requests at hand, as arrays over request slots.

A request's parameters are written once, when it joins; a step only indexes. Shapes: S request
slots, R rows to sample in this step, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest, LogprobOptions

NO_TOP_K = 1 << 30


class SamplingSlots:
    """Row arrays filled by `join` and emptied by `leave`; `counts` holds outputs seen so far."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.greedy = np.ones(num_slots, np.bool_)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_k = np.full(num_slots, NO_TOP_K, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.repetition = np.ones(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.int64)
        self.sample = np.zeros(num_slots, np.int64)
        self.min_position = np.zeros(num_slots, np.int64)  # before it no stop token may come
        self.has_penalty = np.zeros(num_slots, np.bool_)
        self.has_bias = np.zeros(num_slots, np.bool_)
        self.has_logprobs = np.zeros(num_slots, np.bool_)
        self.stops: list[IntArray] = [np.empty(0, np.int32)] * num_slots
        self.bias: list[tuple[IntArray, NDArray[np.float32]]] = [
            (np.empty(0, np.int32), np.empty(0, np.float32))
        ] * num_slots
        self.logprobs: list[LogprobOptions | None] = [None] * num_slots
        self.counts = OutputCounts(num_slots, vocab_size)

    def join(self, slot: int, request: GenerateRequest, outputs: IntArray) -> None:
        """Write the parameters of `request`, which has generated `outputs` already."""
        sampling = request.sampling
        self.greedy[slot] = sampling.greedy
        self.temperature[slot] = 1.0 if sampling.greedy else sampling.temperature
        self.top_k[slot] = sampling.top_k if sampling.top_k > 0 else NO_TOP_K
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self.seed[slot] = sampling.sampling_seed or 0
        self.sample[slot] = request.sample
        self.min_position[slot] = len(request.input_ids) + sampling.min_new_tokens
        self.stops[slot] = self._known((*request.eos_ids, *sampling.stop_token_ids))
        self.bias[slot] = self._bias(sampling.logit_bias)
        self.has_bias[slot] = len(self.bias[slot][0]) > 0
        self.logprobs[slot] = request.logprobs
        self.has_logprobs[slot] = request.logprobs is not None
        neutral = (0.0, 0.0, 1.0)
        self.has_penalty[slot] = neutral != (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        self.counts.drop(slot)
        if self.has_penalty[slot]:
            self.counts.open(slot, outputs)

    def leave(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self.greedy[slot] = True
        self.has_penalty[slot] = self.has_bias[slot] = self.has_logprobs[slot] = False
        self.min_position[slot] = 0
        self.logprobs[slot] = None
        self.counts.drop(slot)

    def sampled(self, slots: IntArray, token_ids: IntArray) -> None:
        """Count the tokens that a step has chosen."""
        chosen = self.has_penalty[slots]
        if chosen.any():
            self.counts.add(slots[chosen], token_ids[chosen])

    def _known(self, ids: tuple[int, ...]) -> IntArray:
        found = np.unique(np.array(ids, np.int64))
        return found[(found >= 0) & (found < self.vocab_size)].astype(np.int32)

    def _bias(self, bias: dict[str, float]) -> tuple[IntArray, NDArray[np.float32]]:
        ids = np.array([int(token) for token in bias], np.int64)
        values = np.array(list(bias.values()), np.float32)
        inside = (ids >= 0) & (ids < self.vocab_size)
        return ids[inside].astype(np.int32), values[inside]


class OutputCounts:
    """How often each id was generated, for the requests that have a penalty only.

    Rows of a dense matrix (rows, V) that grows by doubling; most requests need none.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._matrix = torch.zeros(0, vocab_size)
        self._row_of = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []

    def open(self, slot: int, outputs: IntArray) -> None:
        """Start counting for `slot`, with `outputs` counted already."""
        if not self._free:
            old = self._matrix
            new = torch.zeros(max(4, 2 * len(old)), old.shape[1])
            new[: len(old)] = old
            self._matrix = new
            self._free = list(range(len(old), len(new)))
        row = self._free.pop()
        self._row_of[slot] = row
        self._matrix[row].zero_()
        if len(outputs):
            ids = torch.from_numpy(outputs.astype(np.int64))
            self._matrix[row].index_add_(0, ids, torch.ones(len(ids)))

    def add(self, slots: IntArray, token_ids: IntArray) -> None:
        """One more of `token_ids[i]` for `slots[i]`; a slot may come twice."""
        rows = torch.from_numpy(self._row_of[slots])
        ids = torch.from_numpy(token_ids.astype(np.int64))
        self._matrix.index_put_((rows, ids), torch.ones(len(ids)), accumulate=True)

    def of(self, slots: IntArray) -> torch.Tensor:
        """Counts as float32 (len(slots), V); a copy."""
        return self._matrix[torch.from_numpy(self._row_of[slots])]

    def drop(self, slot: int) -> None:
        """Stop counting for `slot`."""
        if self._row_of[slot] >= 0:
            self._free.append(int(self._row_of[slot]))
            self._row_of[slot] = -1


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Rows to sample in this step.

    `slots` (R,) are their request slots, `positions` (R,) the index of the token that each row
    samples, counted from the start of the prompt.
    """

    slots: IntArray
    positions: NDArray[np.int64]
    params: SamplingSlots

    @property
    def plain(self) -> bool:
        """Whether every row just takes its largest logit."""
        p, s = self.params, self.slots
        special = p.has_penalty[s] | p.has_bias[s] | p.has_logprobs[s]
        return bool(
            p.greedy[s].all() and not special.any() and (self.positions >= p.min_position[s]).all()
        )
