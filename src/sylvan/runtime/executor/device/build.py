"""Builds a device executor from a loaded model: measures memory, sizes the KV cache, captures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sylvan.kernels.api import Communicator
from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.protocol.commands import MemoryTag
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.forward import AttentionBackend, BatchLimits, ForwardBatch, KVCachePool
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.capability import CapabilityWorker, heads_of
from sylvan.runtime.executor.control import Checkpoints, ExecutorControl
from sylvan.runtime.executor.device.backend import DeviceBackend
from sylvan.runtime.executor.device.memory import (
    GRAPH_BYTES,
    DeviceUsage,
    MemoryReport,
    plan_pages,
)
from sylvan.runtime.executor.device.parts import DeviceParts, StepMemory
from sylvan.runtime.executor.device.sampling import device_sampling
from sylvan.runtime.executor.graph_buckets import GraphBucket, decode_buckets, mixed_buckets
from sylvan.runtime.executor.graphs.buckets import BucketRunner
from sylvan.runtime.executor.inputs import Sizes
from sylvan.runtime.executor.local import DeviceExecutor
from sylvan.runtime.executor.runner import EagerRunner, ModelRunner
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.executor.worker import StepWorker
from sylvan.runtime.layers.mesh import SingleRank
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.registry import Model
from sylvan.runtime.platform.api import Memory, Platform
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.releasable import ReleasableMemory, TensorMemory
from sylvan.runtime.pool.states import QueuedStates
from sylvan.runtime.sampling.on_device import DeviceRowParams
from sylvan.runtime.sampling.params import NO_TOP_K
from sylvan.runtime.sampling.processors import LogitsProcessor

logger = logging.getLogger(__name__)

_PROBE_PAGES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """Everything needed to build a device executor.

    Attributes:
        platform: The device that holds the model.
        before: Its memory before the model was loaded.
        model: The model with its weights.
        limits: Size of the largest step.
        context_len: Maximum tokens of a request.
        attention: Attention backend of all layers.
        make_pool: Builds a KV cache of the given number of pages.
        kv_groups: KV groups of a cache of the given number of pages.
        states: Memory for recurrent states, if the model has such layers.
        ranks: Ranks that share the model; all have as many pages as the one with the least memory.
        page_bytes: Bytes of a page in all layers.
        num_pages: Requested number of pages, padding page included; None to fill memory.
        max_pages: Maximum number of pages when filling memory.
        vocab_size: Columns of logits.
        table_rows: Rows of the embedding table, if more than `vocab_size`.
        media_ids: Number of ids that prompts with media may use, if more than `vocab_size`.
        graph: Whether decoding steps replay captured graphs.
        capabilities: Worker halves of capabilities.
        custom: Logits processors.
        weights: The live weights, or the reason why they cannot be read or updated.
        checkpoints: Checkpoints of the model.
        on_built: Called with the inputs of all steps and the runner of the model.
    """

    platform: Platform
    before: Memory
    model: Model
    limits: BatchLimits
    context_len: int
    attention: AttentionBackend
    make_pool: Callable[[int], KVCachePool]
    kv_groups: Callable[[int], tuple[KVGroup, ...]]
    page_bytes: int
    num_pages: int | None
    vocab_size: int
    graph: bool
    capabilities: tuple[CapabilityWorker, ...] = ()
    custom: tuple[LogitsProcessor, ...] = ()
    weights: LiveWeights | str = "the weights of this model can be neither read nor updated"
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    max_pages: int | None = None
    table_rows: int = 0
    media_ids: int = 0
    on_built: Callable[[ForwardBatch, ModelRunner], None] = lambda batch, runner: None
    states: QueuedStates | None = None
    ranks: Communicator = field(default_factory=SingleRank)


def build_device(plan: DevicePlan) -> tuple[DeviceExecutor, MemoryReport]:
    """Build the executor and report its memory use.

    Raises:
        ConfigError: the model or its KV cache does not fit.
    """
    platform, limits = plan.platform, plan.limits
    platform.trim()
    weights = max(0, plan.before.free - platform.memory().free)
    pool = plan.make_pool(_PROBE_PAGES)
    batch = ForwardBatch(limits, pool, plan.attention, platform.device, plan.states)
    memory = StepMemory(platform, batch, plan.vocab_size, plan.table_rows)
    layers = [layer for c in plan.capabilities for layer in c.hidden_layers]
    eager = EagerRunner(plan.model, memory.resolve_in_flight, layers, heads_of(plan.capabilities))
    parts = DeviceParts(
        memory=memory,
        runner=eager,
        sampling=device_sampling(platform.device),
        custom=plan.custom,
    )
    buckets: tuple[GraphBucket, ...] = ()
    if plan.graph:
        # Only the host knows at which tokens of a prompt states are saved.
        mixed = () if plan.states else mixed_buckets(limits.max_tokens, limits.max_reqs)
        buckets = (*decode_buckets(limits.max_reqs), *mixed)
    measured = DeviceUsage(
        total=plan.before.total,
        free=plan.before.free,
        weights=weights,
        activations=platform.peak(lambda: _largest_step(parts, eager, plan.context_len)),
        graphs=_graph_reserve(parts, eager, buckets),
    )
    platform.trim()
    least = min(limits.max_pages_per_req, _PROBE_PAGES) + 1
    report = plan_pages(measured, plan.page_bytes, plan.num_pages, least, plan.max_pages)
    counts = plan.ranks.all_gather(torch.tensor([report.num_pages], device=platform.device))
    report = replace(report, num_pages=int(counts.min()))
    del pool
    batch.kv = plan.make_pool(report.num_pages)
    runner: ModelRunner = eager
    if buckets:
        platform.trim()
        free = platform.memory().free
        runner = _captured(parts, eager, buckets)
        platform.trim()  # frees all but the graphs' private memory
        taken = max(0, free - platform.memory().free)
        report = replace(
            report, measured=replace(measured, graphs=taken), has_graphs=runner is not eager
        )
    logger.info("memory: %s", report.describe())
    caps = ExecutorCaps(
        max_batch_tokens=limits.max_tokens,
        max_running_reqs=limits.max_reqs,
        kv_groups=plan.kv_groups(report.num_pages),
        max_samples=limits.max_sampled_rows,
        draft_chains=plan.states is None,
    )
    plan.on_built(batch, runner)
    slots = RequestSlots(limits.max_reqs, plan.vocab_size, plan.media_ids)
    backend = DeviceBackend(replace(parts, runner=runner), slots)
    control = _control(plan, batch.kv, runner, report.measured.graphs)
    control.extend(plan.capabilities)
    worker = StepWorker(backend, slots, plan.capabilities, control.gate)
    return DeviceExecutor(worker, caps, control), report


def _control(
    plan: DevicePlan, pool: KVCachePool, runner: ModelRunner, graph_bytes: int
) -> ExecutorControl:
    """Build the control object. Graphs hold addresses, so restored memory needs new graphs."""
    graphs = _Graphs(runner, plan.platform, graph_bytes if plan.graph else 0)
    kept = [group.memory for group in pool.groups if isinstance(group, PagedBuffer)]
    kept += plan.states.parts if plan.states else ()
    memory: dict[MemoryTag, ReleasableMemory] = {"kv_cache": TensorMemory(kept), "graphs": graphs}
    if isinstance(plan.weights, LiveWeights):
        memory["weights"] = TensorMemory(plan.weights.memory)
    return ExecutorControl(
        plan.weights,
        memory,
        pool.groups,
        plan.checkpoints,
        on_release=plan.platform.trim,
        on_resume=graphs.resume,
    )


class _Graphs:
    """Implements `ReleasableMemory` for captured graphs."""

    def __init__(self, runner: ModelRunner, platform: Platform, num_bytes: int) -> None:
        self._runner, self._platform, self.num_bytes = runner, platform, num_bytes

    def release(self) -> int:
        if not isinstance(self._runner, BucketRunner):
            return 0
        self._runner.release()
        self._platform.trim()
        return self.num_bytes

    def resume(self) -> None:
        if isinstance(self._runner, BucketRunner):
            self._runner.capture_again()


def _captured(
    parts: DeviceParts, eager: EagerRunner, buckets: Sequence[GraphBucket]
) -> ModelRunner:
    """Capture the graphs of all buckets; return none if steps have work that cannot be captured."""
    runner = BucketRunner(eager, buckets)
    try:
        runner.capture(parts.platform, parts.memory.set_bucket_views)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as why:
        logger.warning("no graphs, kernels are launched one by one: %s", str(why).splitlines()[0])
        return eager
    return runner


def _largest_step(parts: DeviceParts, eager: EagerRunner, longest: int) -> None:
    """Run the largest possible step with prompts and samples; call inside `Stream.run`.

    All rows read and write the padding page.
    """
    memory, limits = parts.memory, parts.limits
    tokens = limits.max_tokens
    longest = min(tokens, longest)
    needed = min(limits.max_reqs, -(-tokens // longest))
    tokens = min(tokens, needed * longest)
    inputs = memory.inputs(tokens, needed)
    host = inputs.host()
    ends = np.minimum(np.arange(1, needed + 1) * longest, tokens)
    starts = np.concatenate([[0], ends[:-1]])
    host.arrays["q_starts"][1 : needed + 1] = ends
    host.arrays["kv_lens"][:needed] = ends - starts
    host.arrays["positions"][:tokens] = np.arange(tokens) - np.repeat(starts, ends - starts)
    host.arrays["in_flight_slots"][:] = -1
    host.arrays["top_k"][:] = NO_TOP_K
    for name in ("temperature", "top_p", "repetition"):
        host.arrays[name][:] = 1.0
    with torch.inference_mode():
        inputs.upload(host)
        samples = min(limits.max_sampled_rows, tokens)
        memory.set_views(inputs, Sizes(tokens, needed, samples), host)
        batch = memory.batch
        if batch.states is not None:
            inputs.device["state_slots"].fill_(-1)
            batch.state_spans = DeviceSpans(batch.q_starts_R, inputs.device["state_slots"][:needed])
        logits = eager.run(batch)
        views = inputs.device
        rows = DeviceRowParams(
            **{name: views[name][:samples] for name in DeviceRowParams.__dataclass_fields__},
        )
        parts.sampling.draw(logits, rows)


def _graph_reserve(parts: DeviceParts, eager: EagerRunner, buckets: Sequence[GraphBucket]) -> int:
    """Bytes to reserve for graphs, which share the memory of the largest one."""

    def largest() -> None:
        with torch.inference_mode():
            eager.run(parts.memory.set_bucket_views(max(buckets)))

    if not buckets:
        return 0
    logits = max(bucket.requests for bucket in buckets) * parts.memory.vocab_size * 4
    return parts.platform.peak(largest) + logits + len(buckets) * GRAPH_BYTES
