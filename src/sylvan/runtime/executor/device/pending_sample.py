"""Launches the sampling of one step; host data is copied before the launch.

Shapes: N rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from sylvan.runtime.executor.device.counts import DeviceCounts
from sylvan.runtime.executor.device.logprobs import LogprobReader, LogprobRequest, sampled_logits
from sylvan.runtime.executor.device.parts import DeviceParts, StagedStep
from sylvan.runtime.executor.results import no_valid_token
from sylvan.runtime.platform.api import Event, PlatformStream
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.draw import filtered
from sylvan.runtime.sampling.on_device import (
    DeviceLogitEdits,
    DeviceRowParams,
    Entries,
    MaskBits,
    Penalties,
)
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch


@dataclass(slots=True, eq=False)
class DevicePendingSample:
    """Implements `PendingSample`: host buffers for sampled ids and their log probabilities."""

    ids: torch.Tensor
    readers: dict[int, LogprobReader] = field(default_factory=dict[int, LogprobReader])  # by row
    event: Event | None = None  # None until the whole step is queued

    def done(self) -> bool:
        return self.event is not None and self.event.done()

    def wait(self) -> SampleOutput:
        assert self.event is not None
        self.event.wait()
        ids = self.ids.numpy().copy()
        errors = no_valid_token(ids.tolist())
        logprobs = {
            row: reader.read(ids[row : row + 1])
            for row, reader in self.readers.items()
            if row not in errors
        }
        return SampleOutput(ids, logprobs, errors)


class SampleLaunch:
    """Samples one step: `prepare` copies parameters and masks, `run` launches the kernels."""

    def __init__(
        self, parts: DeviceParts, counts: DeviceCounts, staged: StagedStep, rows: SamplingBatch
    ) -> None:
        self._parts, self._platform = parts, parts.platform
        self._counts, self._staged, self._rows_of = counts, staged, rows
        self._drawing = DevicePendingSample(self._platform.pinned(len(rows.slots), torch.int32))
        self._masks: tuple[torch.Tensor, torch.Tensor] | None = None  # bits, rows
        self._entries: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and ids, values
        self._greedy = self._filtered = self._penalised = False
        self._temperatures: dict[int, float] = {}  # of rows with log probabilities

    def prepare(self, masks: Masks | None) -> None:
        """Copy parameters, masks and options of the rows."""
        rows, params = self._rows_of, self._rows_of.params
        self._greedy = bool(params.greedy[rows.slots].all())
        self._filtered = bool(filtered(params, rows.slots).any())
        self._penalised = bool(params.has_penalty[rows.slots].any())
        self._keep_masks(masks)
        self._keep_entries(rows)
        for row in np.flatnonzero(params.has_logprobs[rows.slots]).tolist():
            options = params.logprobs[rows.slots[row]]
            assert options is not None
            reader = LogprobReader(self._platform, LogprobRequest(1, options), params.vocab_size)
            self._drawing.readers[row] = reader
            self._temperatures[row] = float(params.temperature[rows.slots[row]])

    def run(
        self, stream: PlatformStream, logits_of: Callable[[], torch.Tensor]
    ) -> DevicePendingSample:
        """Queue the sampling on the stream after the forward pass."""
        if self._parts.custom:
            self._customise(stream, logits_of)

        def work() -> None:
            with torch.inference_mode():
                if not self._parts.custom:
                    self._edit(logits_of())
                self._draw(logits_of())

        stream.run(work)
        return self._drawing

    def _customise(self, stream: PlatformStream, logits_of: Callable[[], torch.Tensor]) -> None:
        """Apply custom processors, which may run any code and even wait for the device."""

        def edit() -> None:
            with torch.inference_mode():
                self._edit(logits_of())

        stream.run(edit)
        stream.event().wait()
        with torch.inference_mode():
            for process in self._parts.custom:
                process(logits_of(), self._rows_of)

    # ---- before the launch

    def _keep_masks(self, masks: Masks | None) -> None:
        if masks is None:
            return
        count = len(self._rows_of.slots)
        bits = self._platform.pinned(masks.bits.size, torch.int32).view(masks.bits.shape)
        bits.numpy()[:] = masks.bits
        rows = self._platform.pinned(count, torch.int32)
        rows.numpy()[:] = -1
        rows.numpy()[masks.rows] = np.arange(len(masks.rows))
        self._masks = bits, rows

    def _keep_entries(self, rows: SamplingBatch) -> None:
        """Copy the logits to change: stop ids that are still banned, and `logit_bias`."""
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

    # ---- inside `PlatformStream.run`

    def _edit(self, logits_NV: torch.Tensor) -> None:
        if self._penalised or self._masks or self._entries:
            self._parts.sampling.edit(logits_NV, self._edits())

    def _draw(self, logits_NV: torch.Tensor) -> None:
        count = len(self._rows_of.slots)
        if not count:
            return
        views = self._staged.inputs.device
        sampling = self._parts.sampling
        # Kernels that generate random numbers have no fast path for all-greedy rows.
        drawn = None if self._greedy and not sampling.generates_random else self._rows(count)
        filters = self._filtered and not self._greedy
        ids_N = sampling.draw(logits_NV, drawn, filtered=filters)
        self._parts.memory.last_S.index_copy_(0, views["slots"][:count].long(), ids_N)
        if self._penalised:
            self._counts.add(views["count_rows"][:count], ids_N)
        for row, reader in self._drawing.readers.items():
            scaled = sampled_logits(logits_NV, row, self._temperatures[row])
            reader.launch(scaled, ids_N[row : row + 1])
        self._drawing.ids.copy_(ids_N, non_blocking=True)

    def _rows(self, count: int) -> DeviceRowParams:
        views = self._staged.inputs.device
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
        return DeviceRowParams(**{name: views[name][:count] for name in names})

    def _edits(self) -> DeviceLogitEdits:
        count, views = len(self._rows_of.slots), self._staged.inputs.device
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
        return DeviceLogitEdits(penalties=penalties, masks=masks, entries=entries)
