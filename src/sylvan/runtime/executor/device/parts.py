"""What a device worker is made of, and the memory that all its steps share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.device.layout import Host, StagedInputs, step_layout
from sylvan.runtime.executor.device.table import DevicePageTable
from sylvan.runtime.executor.inputs import Sizes
from sylvan.runtime.executor.runner import ModelRunner
from sylvan.runtime.executor.sizes import GraphBucket
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.sampling.on_device import DeviceSampling
from sylvan.runtime.sampling.processors import LogitsProcessor

_HOST_COPIES = 3  # two steps under way, and the one that is being written


class StepMemory:
    """Persistent inputs, narrow ones for decoding and wide ones for prompts, and newest tokens.

    Inputs are what graphs read. `last_S` is the newest token of each request slot; one more
    slot takes those of padding.
    """

    def __init__(self, platform: Platform, batch: ForwardBatch, vocab_size: int) -> None:
        limits = batch.limits
        self.platform, self.batch, self.vocab_size = platform, batch, vocab_size
        self.last_S = torch.zeros(limits.max_reqs + 1, dtype=torch.int32, device=platform.device)
        self.table = DevicePageTable(platform, batch.host.page_tables, batch.page_tables)
        reqs, groups = limits.max_reqs, len(batch.page_tables)
        self._narrow = StagedInputs(step_layout(reqs, reqs, groups), platform, _HOST_COPIES)
        wide = step_layout(limits.max_tokens, reqs, groups, limits.most_samples)
        self._wide = StagedInputs(wide, platform, _HOST_COPIES)
        starts = self._narrow.device["q_starts"]  # as every decoding step has them
        starts.copy_(torch.arange(len(starts), dtype=torch.int32))
        self._ids = self._feed = torch.empty(0)

    def inputs(self, tokens: int, requests: int) -> StagedInputs:
        """Where a step of so many is written."""
        return self._narrow if tokens == requests else self._wide

    def point(self, inputs: StagedInputs, sizes: Sizes, host: Host | None = None) -> None:
        """Make the batch read the first rows of the inputs; inside `Stream.run`.

        `host` is what they were uploaded from, for backends that plan on the host.
        """
        batch, device = self.batch, inputs.device
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
        batch.slot_mappings = device["slot_mappings"][:, :rows]
        batch.kv_lens_R = device["kv_lens"][:requests]
        batch.q_starts_R = device["q_starts"][: requests + 1]
        batch.req_slots_R = device["req_slots"][:requests]
        batch.sample_rows = device["sample_rows"][:samples]
        self._feed = device["feed"][:rows]

    def feed(self, batch: ForwardBatch) -> None:
        """Ids that were not known on the host are the newest tokens; part of graphs.

        What is read are the persistent inputs, also when the batch was fed before: a graph is
        captured after the same step was run to warm up.
        """
        newest = self.last_S[self._feed.clamp_min(0)]
        ids = torch.where(self._feed >= 0, newest, self._ids)
        batch.input_ids_T = ids.clamp(0, self.vocab_size - 1)

    def point_bucket(self, bucket: GraphBucket) -> ForwardBatch:
        """Make the batch a step of padding only, for capturing."""
        inputs = self.inputs(bucket.rows, bucket.requests)
        if not bucket.decodes:
            inputs.clear()
        self.point(inputs, Sizes(0, 0, 0, bucket))
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
        """Largest step."""
        return self.memory.batch.limits


Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step's inputs: where they are written, and how many count."""

    inputs: StagedInputs
    host: Host
    sizes: Sizes
