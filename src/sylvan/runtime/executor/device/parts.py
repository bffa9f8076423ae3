"""The objects that a device worker is made of, and the device memory shared by all its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.runtime.core.forward import NO_EDITS, BatchLimits, ForwardBatch, StepEdits
from sylvan.runtime.executor.device.edits import StagedEdits
from sylvan.runtime.executor.device.layout import HostInputs, StagedInputs, step_layout
from sylvan.runtime.executor.device.table import DevicePageTable
from sylvan.runtime.executor.graph_buckets import GraphBucket
from sylvan.runtime.executor.inputs import Sizes
from sylvan.runtime.executor.runner import ModelRunner
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.sampling.on_device import DeviceSampling
from sylvan.runtime.sampling.processors import LogitsProcessor

_HOST_COPIES = 3  # two steps in flight, and one being written


class StepMemory:
    """Persistent inputs (narrow for decoding, wide for prompts) and newest tokens.

    Captured graphs read these inputs. `last_S` is the newest token of each request slot, plus an
    entry for padding.
    """

    def __init__(
        self, platform: Platform, batch: ForwardBatch, vocab_size: int, table_rows: int = 0
    ) -> None:
        """`table_rows`: rows of the embedding table, if more than the vocabulary."""
        limits = batch.limits
        self.platform, self.batch, self.vocab_size = platform, batch, vocab_size
        self._table_rows = max(vocab_size, table_rows)
        self.last_S = torch.zeros(limits.max_reqs + 1, dtype=torch.int32, device=platform.device)
        self.table = DevicePageTable(platform, batch.host.page_tables, batch.page_tables)
        reqs, groups = limits.max_reqs, len(batch.page_tables)
        self._narrow = StagedInputs(step_layout(reqs, reqs, groups), platform, _HOST_COPIES)
        wide = step_layout(limits.max_tokens, reqs, groups, limits.max_sampled_rows)
        self._wide = StagedInputs(wide, platform, _HOST_COPIES)
        starts = self._narrow.device["q_starts"]  # same for every decoding step
        starts.copy_(torch.arange(len(starts), dtype=torch.int32))
        self._ids = self._in_flight_slots = torch.empty(0)

    def inputs(self, tokens: int, requests: int) -> StagedInputs:
        """Return the inputs that a step of this size uses."""
        return self._narrow if tokens == requests else self._wide

    def set_views(
        self,
        inputs: StagedInputs,
        sizes: Sizes,
        host: HostInputs | None = None,
        edits: StepEdits = NO_EDITS,
    ) -> None:
        """Make the batch view the rows of the inputs that a step uses; call inside `Stream.run`.

        `host`: the host copy of the inputs, for attention backends that plan on the host.
        """
        batch, device = self.batch, inputs.device
        batch.edits = edits
        if host is not None:
            for name in ("q_starts", "kv_lens", "req_slots"):
                getattr(batch.host, name)[:] = host.arrays[name]
        rows, requests, samples = sizes.tokens, sizes.requests, sizes.samples
        if sizes.bucket is not None:
            rows, requests = sizes.bucket.rows, sizes.bucket.requests
            samples = requests
        batch.num_tokens, batch.num_reqs, batch.num_samples = rows, requests, samples
        batch.input_ids_T = self._ids = device["input_ids"][:rows]
        batch.positions_T = device["positions"][:rows]
        batch.token_types_T = device["token_types"][:rows]
        batch.slot_mappings = device["slot_mappings"][:, :rows]
        batch.kv_lens_R = device["kv_lens"][:requests]
        batch.q_starts_R = device["q_starts"][: requests + 1]
        batch.req_slots_R = device["req_slots"][:requests]
        batch.sample_rows = device["sample_rows"][:samples]
        self._in_flight_slots = device["in_flight_slots"][:rows]
        batch.state_spans = None
        if batch.states is not None and sizes.bucket is not None:
            batch.state_spans = DeviceSpans(batch.q_starts_R, device["state_slots"][:requests])

    def resolve_in_flight(self, batch: ForwardBatch) -> None:
        """Resolve ids in flight to the newest tokens of their slots; captured in graphs.

        Always reads the persistent inputs, even if the batch was resolved before, because the
        warm-up step precedes the capture.
        """
        newest = self.last_S[self._in_flight_slots.clamp_min(0)]
        ids = torch.where(self._in_flight_slots >= 0, newest, self._ids)
        batch.input_ids_T = ids.clamp(0, self._table_rows - 1)

    def set_bucket_views(self, bucket: GraphBucket) -> ForwardBatch:
        """Make the batch a step of padding of this size, for capturing a graph."""
        inputs = self.inputs(bucket.rows, bucket.requests)
        if not bucket.decodes:
            inputs.clear()
        inputs.device["state_slots"].fill_(-1)
        self.set_views(inputs, Sizes(0, 0, 0, bucket))
        return self.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceParts:
    """Everything that a device worker needs."""

    memory: StepMemory
    runner: ModelRunner
    sampling: DeviceSampling
    custom: tuple[LogitsProcessor, ...] = ()

    @property
    def platform(self) -> Platform:
        """The device."""
        return self.memory.platform

    @property
    def limits(self) -> BatchLimits:
        """Size of the largest step."""
        return self.memory.batch.limits


Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """Inputs of a step: the buffer they are written to, the sizes in use, and the edits."""

    inputs: StagedInputs
    host: HostInputs
    sizes: Sizes
    edits: StagedEdits
