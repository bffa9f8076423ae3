"""Launches the sampling of one step; everything that is read of the host is copied before.

Shapes: N rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.runtime.executor.device.counts import DeviceCounts
from sylvan.runtime.executor.device.logprobs import (
    LogprobReader,
    Wanted,
    index_on,
    sampled_logits,
)
from sylvan.runtime.executor.device.parts import DeviceParts, Placed
from sylvan.runtime.executor.device.step import DeviceStep
from sylvan.runtime.executor.plan import PromptWant
from sylvan.runtime.platform.api import Stream
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.draw import filtered
from sylvan.runtime.sampling.on_device import Edits, Entries, MaskBits, Penalties, Rows
from sylvan.runtime.sampling.params import SamplingBatch

_PROMPT_BLOCK_BYTES = 256 << 20  # logits of prompt positions held at once


class SampleLaunch:
    """`prepare` reads what the step needs of parameters and constraints, `run` launches it."""

    def __init__(
        self, parts: DeviceParts, counts: DeviceCounts, placed: Placed, step: DeviceStep
    ) -> None:
        self._parts, self._platform = parts, parts.platform
        self._counts, self._placed, self._step = counts, placed, step
        self._masks: tuple[torch.Tensor, torch.Tensor] | None = None  # bits, rows
        self._entries: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and ids, values
        self._greedy = self._filtered = self._penalised = False
        self._temperatures: dict[int, float] = {}  # of rows with log probabilities
        self._blocks: list[_Block] = []
        self._rows_of: SamplingBatch | None = None

    def prepare(self, rows: SamplingBatch, bad: dict[int, str], *, bound: bool) -> SampleLaunch:
        """Copy parameters, masks and options of the rows."""
        params, plan = rows.params, self._step.plan
        self._greedy = bool(params.greedy[rows.slots].all())
        self._filtered = bool(filtered(params, rows.slots).any())
        self._penalised = bool(params.has_penalty[rows.slots].any())
        constraints = self._parts.constraints
        if bound and constraints is not None:
            constraints.prepare(rows.slots, rows.positions)
            self._keep_masks(constraints.masks(rows))
            self._step.follow = lambda ids: constraints.advance(rows, ids)
        self._keep_entries(rows)
        for row in np.flatnonzero(params.has_logprobs[rows.slots]).tolist():
            options = params.logprobs[rows.slots[row]]
            assert options is not None
            reader = LogprobReader(self._platform, Wanted(1, options), params.vocab_size)
            self._step.logprobs[row] = reader
            self._temperatures[row] = float(params.temperature[rows.slots[row]])
        for want in plan.prompt:
            options = params.logprobs[plan.slots[want.index]]
            if options is not None:
                wanted = Wanted(len(want.rows), options)
                reader = LogprobReader(self._platform, wanted, params.vocab_size)
                self._step.prompt[want.index] = reader, want.token_ids
                self._blocks += self._split(reader, want)
        self._step.bad = {
            index: why
            for index in plan.samples.tolist()
            if (why := bad.get(int(plan.slots[index])))
        }
        self._rows_of = rows
        return self

    def run(self, stream: Stream, logits_of: Callable[[], torch.Tensor]) -> None:
        """Give it to the stream, after the forward pass."""
        if self._parts.custom:
            self._customise(stream, logits_of)

        def work() -> None:
            with torch.inference_mode():
                if not self._parts.custom:
                    self._edit(logits_of())
                self._draw(logits_of())
                self._prompt()

        stream.run(work)

    def _customise(self, stream: Stream, logits_of: Callable[[], torch.Tensor]) -> None:
        """Processors of others may do anything, waiting for the device included."""

        def edit() -> None:
            with torch.inference_mode():
                self._edit(logits_of())

        stream.run(edit)
        stream.event().wait()
        assert self._rows_of is not None
        with torch.inference_mode():
            for process in self._parts.custom:
                process(logits_of(), self._rows_of)

    # ---- before the launch

    def _keep_masks(self, masks: Masks | None) -> None:
        if masks is None:
            return
        count = len(self._step.plan.samples)
        bits = self._platform.pinned(masks.bits.size, torch.int32).view(masks.bits.shape)
        bits.numpy()[:] = masks.bits
        rows = self._platform.pinned(count, torch.int32)
        rows.numpy()[:] = -1
        rows.numpy()[masks.rows] = np.arange(len(masks.rows))
        self._masks = bits, rows

    def _split(self, reader: LogprobReader, want: PromptWant) -> list[_Block]:
        """In blocks of rows, so that memory does not grow with the prompt."""
        size = max(1, _PROMPT_BLOCK_BYTES // (4 * self._parts.memory.vocab_size))
        return [
            _Block(
                reader,
                start,
                index_on(self._platform, want.rows[start : start + size]),
                index_on(self._platform, want.token_ids[start : start + size]),
            )
            for start in range(0, len(want.rows), size)
        ]

    def _keep_entries(self, rows: SamplingBatch) -> None:
        """Stop ids that come too early, and `logit_bias`."""
        params, slots = rows.params, rows.slots
        parts: list[tuple[int, np.ndarray, np.ndarray]] = []
        for row in np.flatnonzero(rows.positions < params.min_position[slots]).tolist():
            ids = params.stops[slots[row]]
            parts.append((row, ids, np.full(len(ids), -np.inf, np.float32)))
        for row in np.flatnonzero(params.has_bias[slots]).tolist():
            ids, values = params.bias[slots[row]]
            parts.append((row, ids, values))
        count = sum(len(ids) for _, ids, _ in parts)
        if not count:
            return
        where = self._platform.pinned(2 * count, torch.int32).view(2, count)
        value = self._platform.pinned(count, torch.float32)
        where.numpy()[0] = np.concatenate([np.full(len(i), row, np.int32) for row, i, _ in parts])
        where.numpy()[1] = np.concatenate([ids for _, ids, _ in parts])
        value.numpy()[:] = np.concatenate([values for _, _, values in parts])
        self._entries = where, value

    # ---- inside `Stream.run`

    def _edit(self, logits_NV: torch.Tensor) -> None:
        if self._penalised or self._masks or self._entries:
            self._parts.sampling.edit(logits_NV, self._edits())

    def _draw(self, logits_NV: torch.Tensor) -> None:
        count = len(self._step.plan.samples)
        if not count:
            return
        views = self._placed.inputs.device
        drawn = None if self._greedy else self._rows(count)
        ids_N = self._parts.sampling.draw(logits_NV, drawn, filtered=self._filtered)
        self._parts.memory.last_S.index_copy_(0, views["slots"][:count].long(), ids_N)
        if self._penalised:
            self._counts.add(views["count_rows"][:count], ids_N)
        for row, reader in self._step.logprobs.items():
            scaled = sampled_logits(logits_NV, row, self._temperatures[row])
            reader.launch(scaled, ids_N[row : row + 1])
        self._step.ids.copy_(ids_N, non_blocking=True)

    def _rows(self, count: int) -> Rows:
        views = self._placed.inputs.device
        names = (
            "greedy",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "sample",
            "position",
            "uniform",
        )
        return Rows(**{name: views[name][:count] for name in names})

    def _edits(self) -> Edits:
        count, views = len(self._step.plan.samples), self._placed.inputs.device
        device = self._platform.device
        penalties = masks = entries = None
        if self._penalised:
            names = ("count_rows", "frequency", "presence", "repetition")
            parts = {name: views[name][:count] for name in names}
            penalties = Penalties(counts=self._counts.matrix, **parts)
        if self._masks is not None:
            bits, rows = self._masks
            masks = MaskBits(*(x.to(device, non_blocking=True) for x in (bits, rows)))
        if self._entries is not None:
            where, value = (x.to(device, non_blocking=True) for x in self._entries)
            entries = Entries(where[0], where[1], value)
        return Edits(penalties=penalties, masks=masks, entries=entries)

    def _prompt(self) -> None:
        device = self._platform.device
        for block in self._blocks:
            rows, ids = (x.to(device, non_blocking=True) for x in (block.rows, block.ids))
            block.reader.launch(self._parts.runner.at(rows).float(), ids, block.start)


@dataclass(frozen=True, slots=True)
class _Block:
    """Prompt positions from `start` on: their rows of the step, and the ids they predict."""

    reader: LogprobReader
    start: int
    rows: torch.Tensor
    ids: torch.Tensor
