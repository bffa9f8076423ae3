"""Sampling parameters of current requests, as arrays over request slots.

A request's parameters are written once, when it joins; a step only indexes. Shapes: S request
slots, R rows to sample in this step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest, LogprobOptions

NO_TOP_K = 1 << 30


class SamplingSlots:
    """Arrays over request slots, set by `join` and cleared by `leave`; `counts`: generated ids."""

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
        self.min_position = np.zeros(num_slots, np.int64)  # no stop token may be sampled before it
        self.has_penalty = np.zeros(num_slots, np.bool_)
        self.has_bias = np.zeros(num_slots, np.bool_)
        self.has_logprobs = np.zeros(num_slots, np.bool_)
        self.top = np.zeros(num_slots, np.int32)  # number of alternatives with log probabilities
        self.logprobs: list[LogprobOptions | None] = [None] * num_slots
        self.num_logprobs = 0  # number of slots that want log probabilities
        self.bias: list[tuple[IntArray, NDArray[np.float32]]] = [
            (np.empty(0, np.int32), np.empty(0, np.float32))
        ] * num_slots
        self.stops = SlotLists(num_slots, np.int32)
        self.bias_ids = SlotLists(num_slots, np.int32)
        self.bias_values = SlotLists(num_slots, np.float32)
        self.chosen_ids = SlotLists(num_slots, np.int32)  # ids with log probabilities
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
        self.stops.put(slot, self._known((*request.eos_ids, *sampling.stop_token_ids)))
        self._add(slot, sampling.logit_bias)
        self._want(slot, request.logprobs)
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
        """Clear the parameters of `slot`."""
        self.greedy[slot] = True
        self.has_penalty[slot] = self.has_bias[slot] = self.has_logprobs[slot] = False
        self.min_position[slot] = 0
        for lists in (self.stops, self.bias_ids, self.bias_values):
            lists.drop(slot)
        self._want(slot, None)
        self.counts.drop(slot)

    def sampled(self, slots: IntArray, token_ids: IntArray) -> None:
        """Count the tokens that a step has sampled, for penalties."""
        if not self.counts:
            return
        chosen = self.has_penalty[slots]
        if chosen.any():
            self.counts.add(slots[chosen], token_ids[chosen])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, with lists as addresses and lengths, for native code."""
        plain = {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        lists = {
            "stops": self.stops,
            "bias_ids": self.bias_ids,
            "bias": self.bias_values,
            "chosen_ids": self.chosen_ids,
        }
        lengths = {f"num_{n.removesuffix('_ids')}": x.lengths for n, x in lists.items()}
        addresses = {name: x.addresses for name, x in lists.items()}
        counts = {"counts_row": self.counts.rows, "counts": self.counts.matrix}
        return plain | lengths | addresses | counts

    def _want(self, slot: int, options: LogprobOptions | None) -> None:
        if options is self.logprobs[slot]:
            return
        self.num_logprobs += (options is not None) - (self.logprobs[slot] is not None)
        self.logprobs[slot] = options
        self.has_logprobs[slot] = options is not None
        self.top[slot] = min(options.top, self.vocab_size) if options else 0
        self.chosen_ids.put(slot, np.array(options.token_ids if options else (), np.int32))

    def _known(self, ids: tuple[int, ...]) -> IntArray:
        return np.array(sorted({i for i in ids if 0 <= i < self.vocab_size}), np.int32)

    def _add(self, slot: int, bias: Mapping[str, float]) -> None:
        known = {int(i): value for i, value in bias.items() if 0 <= int(i) < self.vocab_size}
        ids, values = np.array([*known], np.int32), np.array([*known.values()], np.float32)
        self.bias[slot] = ids, values
        self.bias_ids.put(slot, ids)
        self.bias_values.put(slot, values)
        self.has_bias[slot] = len(ids) > 0


class SlotLists:
    """A short array per slot, and its address for native code."""

    def __init__(self, num_slots: int, dtype: type[np.generic]) -> None:
        self._empty: NDArray[Any] = np.empty(0, dtype)
        self._arrays: list[NDArray[Any]] = [self._empty] * num_slots
        self.addresses = np.zeros(num_slots, np.int64)
        self.lengths = np.zeros(num_slots, np.int32)

    def __getitem__(self, slot: int) -> NDArray[Any]:
        return self._arrays[slot]

    def put(self, slot: int, array: NDArray[Any]) -> None:
        """Store `array`, which must not change afterwards."""
        if not len(array):
            self.drop(slot)
            return
        kept = self._arrays[slot] = np.ascontiguousarray(array, self._empty.dtype)
        self.addresses[slot], _ = kept.__array_interface__["data"]
        self.lengths[slot] = len(array)

    def drop(self, slot: int) -> None:
        """Clear the slot."""
        self._arrays[slot] = self._empty
        self.lengths[slot] = 0


class OutputCounts:
    """How often each id was generated, for requests with a penalty only.

    `matrix` float32 (rows, V) grows by doubling, because most requests need no row. `rows` is the
    row of each slot; -1: none.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.matrix: NDArray[np.float32] = np.zeros((0, vocab_size), np.float32)
        self.rows = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []

    def __bool__(self) -> bool:
        return len(self._free) < len(self.matrix)

    def open(self, slot: int, outputs: IntArray) -> None:
        """Start counting for `slot`, with `outputs` counted already."""
        if not self._free:
            old = self.matrix
            self.matrix = np.zeros((max(4, 2 * len(old)), old.shape[1]), np.float32)
            self.matrix[: len(old)] = old
            self._free = list(range(len(old), len(self.matrix)))
        row = self._free.pop()
        self.rows[slot] = row
        self.matrix[row] = 0
        np.add.at(self.matrix[row], outputs, 1)

    def add(self, slots: IntArray, token_ids: IntArray) -> None:
        """Add one to the count of `token_ids[i]` for `slots[i]`; slots may repeat."""
        np.add.at(self.matrix, (self.rows[slots], token_ids), 1)

    def of(self, slots: IntArray) -> NDArray[np.float32]:
        """Counts (len(slots), V); a copy."""
        return self.matrix[self.rows[slots]]

    def drop(self, slot: int) -> None:
        """Stop counting for `slot`."""
        if self.rows[slot] >= 0:
            self._free.append(int(self.rows[slot]))
            self.rows[slot] = -1


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
        """Whether every row is greedy without edits."""
        p, s = self.params, self.slots
        special = p.has_penalty[s] | p.has_bias[s] | p.has_logprobs[s]
        return bool(
            p.greedy[s].all() and not special.any() and (self.positions >= p.min_position[s]).all()
        )
