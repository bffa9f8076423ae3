"""Builds the executor of a model: loads the weights, chooses a runner, sizes the KV cache."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sylvan.config.fields import size_text
from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.attend import NativePagedAttention
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.paged.pages import SCALED
from sylvan.protocol.commands import MemoryTag
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.native import NativeAttention, NativeTensorAttention
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch, KVCachePool
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.api import Executor, ExecutorCaps
from sylvan.runtime.executor.attention_choice import choose_attention
from sylvan.runtime.executor.background_writes import BackgroundWrites
from sylvan.runtime.executor.capability import heads_of
from sylvan.runtime.executor.control import ExecutorControl
from sylvan.runtime.executor.division import check_division, on_stage
from sylvan.runtime.executor.experts import ExpertMover
from sylvan.runtime.executor.facts import LoadedModelInfo, facts_of
from sylvan.runtime.executor.failures import shortage
from sylvan.runtime.executor.graphs.layers import use_layer_kernels
from sylvan.runtime.executor.graphs.natives import NativeKernels
from sylvan.runtime.executor.graphs.program import ProgramRunner, host_calls, tracers
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.executor.load_cache import packed_weight_file
from sylvan.runtime.executor.loading import deferred_model, loaded_model
from sylvan.runtime.executor.local import LocalExecutor
from sylvan.runtime.executor.options import ExecutorParts, LocalOptions
from sylvan.runtime.executor.parts import (
    BuiltModel,
    KeptStates,
    ModelPlan,
    device_states,
    suits_device,
)
from sylvan.runtime.executor.plan_workers import plan_worker
from sylvan.runtime.executor.pools import (
    cache_groups,
    pages_shape,
    pool_bytes,
    program_pool,
    tensor_pool,
    with_mirrored_pages,
    with_paths,
)
from sylvan.runtime.executor.runner import EagerRunner
from sylvan.runtime.executor.save_program import saver
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.executor.trees import TreePaths, pages_of_path
from sylvan.runtime.executor.worker_halves import DeferredParts, adapter_of, worker_halves
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import ONE_RANK, Mesh
from sylvan.runtime.models.checkpoint import (
    Progress,
    load_deferred,
)
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.encoder_config import with_mlm_head
from sylvan.runtime.models.holders import with_tensors
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.pooling import PoolingOverride, read_pooling
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.models.slots import slots
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.runtime.pool.mha import KVShape, bytes_of
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.prefault import PagePrefaulter
from sylvan.runtime.pool.prefaulted import PrefaultedMemory
from sylvan.runtime.pool.releasable import ReleasableMemory, TensorMemory
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


def build_executor(
    model_dir: Path,
    options: LocalOptions,
    *,
    progress: Progress | None = None,
    parts: ExecutorParts | None = None,
    platform: Platform | None = None,
    mesh: Mesh = ONE_RANK,
) -> tuple[Executor, LoadedModelInfo]:
    """Load a model, or this rank's shard of it, and build the executor that runs it.

    Args:
        model_dir: Model directory.
        options: How to serve the model.
        progress: Called with the number of bytes loaded so far.
        parts: Worker halves of capabilities, logits processors, and memory to continue with.
        platform: Overrides the platform of `options.device`.
        mesh: The ranks that share the model; each of them calls this.

    Raises:
        ConfigError: the model or an option is not supported; the message is one sentence.
    """
    config = load_config(model_dir, headless=options.headless, trusted=options.trusted)
    check_division(config, mesh)
    mesh = on_stage(mesh, config)
    facts = facts_of(config, model_dir, options.dtype, options.quantization)
    pooling = None
    if options.embed is not None or config.head != "lm":
        pooling = read_pooling(model_dir, config, options.embed or PoolingOverride())
        if pooling.pools_logits:
            config = with_mlm_head(config)
            facts = facts_of(config, model_dir, options.dtype, options.quantization)
    context = options.context_len or facts.context_len
    if platform is None and options.device != "cpu":
        platform = _open(options.device)
    lowered = platform is not None and bool(platform.facts.lowering)
    if lowered:
        options = replace(options, fill=False)  # pages are planned, not measured
    plan = ModelPlan(
        model_dir=model_dir,
        config=config,
        options=options,
        build=Build(
            dtype=getattr(torch, facts.dtype),
            length=context,
            spare_positions=options.max_batch_tokens if config.rope_axes else 0,
            device=platform.device if platform else torch.device("cpu"),
            mesh=mesh,
        ),
        limits=BatchLimits(
            max_tokens=options.max_batch_tokens,
            max_reqs=options.max_running_reqs,
            max_samples=options.max_samples,
            max_paths=options.tree_paths,
            max_pages_per_req=-(-(context + 1) // options.page_size),
        ),
        progress=progress,
        pooling=pooling,
        platform=platform,
        memory=parts.memory if parts else None,
    )
    numbers = facts.kv_bytes_per_token // plan.build.dtype.itemsize
    scaled = config.head_dim if plan.scales_tokens else 0
    kv_bytes = bytes_of(numbers, plan.kv_type, scaled)
    facts = replace(facts, kv_bytes_per_token=kv_bytes, expert_load=plan.loads)
    parts = parts or ExecutorParts()
    if platform is not None and suits_device(plan) and not lowered:
        return _on_device(plan, platform, parts, facts)
    try:
        return _in_memory(plan, parts, facts)
    except (MemoryError, RuntimeError) as error:
        if not (lack := shortage(error)):
            raise
        raise ConfigError(
            f"too little memory: {lack}. Lower cache.memory, context_len, "
            "scheduler.max_batch_tokens or scheduler.max_running_reqs, or choose a smaller model"
        ) from None


def _states(plan: ModelPlan) -> KeptStates | None:
    """Allocate the recurrent states of a model without a step program; None: it has none."""
    return None if plan.states is None else plan.states.tensors(plan.build.device)


def _slots(plan: ModelPlan) -> RequestSlots:
    config = plan.config
    ids = config.vocab_size, config.media_ids, config.table_rows
    return RequestSlots(plan.limits.max_reqs, *ids)


def _in_memory(
    plan: ModelPlan, parts: ExecutorParts, facts: LoadedModelInfo
) -> tuple[Executor, LoadedModelInfo]:
    """Build the executor of a model in host memory: overlapped, or on the caller's thread."""
    options, config, pooling = plan.options, plan.config, plan.pooling
    deferred = DeferredParts()
    workers = worker_halves(plan, parts, deferred)
    plan = replace(
        plan,
        hidden_layers=tuple(layer for w in workers for layer in w.hidden_layers),
        edits_inputs=any(w.edits_inputs for w in workers),
        adapt=adapter_of(workers),
        on_head=heads_of(workers),
    )
    made = _lowered(plan) or _with_program(plan)
    if made is None:
        assert plan.memory is None, "the executor before had a step program"
        made = _with_tensors(plan)
    states = made.states or _states(plan)
    mirrored = [worker.mirrored_pages for worker in workers if worker.mirrored_pages is not None]
    deferred.pages = [
        *with_mirrored_pages(made.pool.groups, mirrored),
        *([states.pages] if states else []),
    ]
    host = plan.memory.host if plan.memory else None
    batch = ForwardBatch(plan.limits, made.pool, made.attention, plan.build.device, states, host)
    slots = plan.memory.slots if plan.memory else _slots(plan)
    deferred.batch = batch
    deferred.runner, deferred.sampler, deferred.params = (
        made.runner,
        _sampler(made, parts),
        slots.params,
    )
    shape = pages_shape(plan.paged_config, plan.kv_shape, options)
    trees = _tree_paths(batch, shape, options)
    sampler, stage = _sampler(made, parts), plan.stage
    backend = ImmediateBackend(made.runner, batch, sampler, slots, trees, stage)
    prefaulter = PagePrefaulter(_host_groups(made.pool))
    control = _control(plan, made, states, mirrored, prefaulter)
    control.extend(workers)
    control.finish_first(writes := BackgroundWrites())
    if made.kept is not None and made.kept.unwritten:
        writes.add(made.kept.write)
    mesh = plan.build.mesh
    worker = plan_worker(mesh, backend, slots, workers, control.gate, prefaulter)
    chains = made.runner.verifies_drafts and (not config.states or config.path == "native")
    chains = chains and (stage.count == 1 or not config.states) and options.data_groups == 1
    masked = made.attention.caps.tree_mask and not config.states
    alone = stage.count == 1 and mesh.attention is None
    branching = chains and alone and (trees is not None or masked)
    caps = ExecutorCaps(
        max_batch_tokens=options.max_batch_tokens,
        max_running_reqs=options.max_running_reqs,
        kv_groups=cache_groups(plan.paged_config, shape, states.num_slots if states else 0),
        bidirectional=not config.causal,
        makes_vectors=pooling is not None,
        pools_all=pooling is not None and pooling.reads_all,
        fills=config.diffusion is not None,
        max_samples=plan.limits.max_sampled_rows,
        draft_chains=chains,
        draft_trees=branching,
        tree_paths=options.tree_paths,
        stages=stage.count,
        attention_dp=mesh.attention_dp * options.data_groups,
    )
    deferred.groups = caps.kv_groups
    facts = replace(
        facts,
        runner=made.name,
        exact=made.exact,
        program=made.program,
        use=made.use,
        num_states=states.num_slots if states else 0,
        kv_bytes=pool_bytes(made.pool),
        weight_bytes=made.weight_bytes or facts.weight_bytes,
        save=saver(plan, made, caps, writes),
    )
    if pooling is not None:
        facts = replace(facts, vector_size=pooling.size, forms=pooling.forms)
    prefaulter.start()
    return LocalExecutor(worker, caps, control, overlap=options.overlap), facts


def _control(
    plan: ModelPlan,
    made: BuiltModel,
    states: KeptStates | None,
    mirrored: Sequence[PagedBuffer],
    prefaulter: PagePrefaulter,
) -> ExecutorControl:
    """Build the control object for commands between steps."""
    kept = [group.memory for group in made.pool.groups if isinstance(group, PagedBuffer)]
    kept += [pages.memory for pages in mirrored]
    kept += states.parts if states else ()
    graphs = TensorMemory(made.buffers)
    pages = PrefaultedMemory(TensorMemory(kept), prefaulter)
    memory: dict[MemoryTag, ReleasableMemory] = {"kv_cache": pages, "graphs": graphs}
    if not _host_groups(made.pool):
        memory = {}  # a device owns the memory; we cannot release it
    if isinstance(made.weights, LiveWeights):
        memory["weights"] = TensorMemory(made.weights.memory)
    control = ExecutorControl(made.weights, memory, made.pool.groups, plan.checkpoints)
    if plan.expert_layers and isinstance(live := made.weights, LiveWeights):
        mesh, layers = plan.build.mesh, plan.expert_layers
        control.move_experts(lambda files: ExpertMover(mesh, layers, live, files).run)
    if isinstance(made.runner, ProgramRunner):
        control.measure(made.runner)
    return control


def _tree_paths(batch: ForwardBatch, shape: KVShape, options: LocalOptions) -> TreePaths | None:
    if not options.tree_paths:
        return None
    firsts = [group.num_pages for group in shape.kv_groups]
    return TreePaths(batch, firsts, pages_of_path(options.tree_depth, shape.page_size))


def _sampler(made: BuiltModel, parts: ExecutorParts) -> TokenSampler:
    """Choose the native sampler; PyTorch's for custom processors, or if nothing is compiled."""
    if parts.custom or made.library is None:
        return Sampler(parts.custom)
    return NativeSampler(made.library)


def _host_groups(pool: KVCachePool) -> Sequence[PageMemory]:
    """KV groups whose pages are tensors of this process; empty for other pools."""
    return [group for group in pool.groups if isinstance(group, PagedBuffer)]


def _lowered(plan: ModelPlan) -> BuiltModel | None:
    """Build the model with the platform's lowering of step programs; None if it has none."""
    if plan.platform is None or not plan.platform.facts.lowering:
        return None
    module, _, function = plan.platform.facts.lowering.partition(":")
    build = getattr(importlib.import_module(module), function)
    if plan.config.path == "transformers":
        return build(plan, None)  # raises the ConfigError that explains why not
    model = deferred_model(plan)
    plan.adapt(model)
    return build(plan, model)


def _with_program(plan: ModelPlan) -> BuiltModel | None:
    """Build a step program; None if it is not possible and `runner` does not require it."""
    options = plan.options
    if options.runner == "eager" and not options.deterministic:
        return None
    try:
        return _with_traced(plan)
    except (Unsupported, LibraryMissing) as why:
        if options.deterministic:
            raise ConfigError(
                f"deterministic=true cannot be kept: {why}, and without a step program results "
                "depend on the batch; leave runner and deterministic "
                "at auto"
            ) from None
        if options.runner == "program":
            raise ConfigError(
                f"runner program cannot be used: {why}; runner eager serves every model"
            ) from None
        logger.warning("no step program, PyTorch computes each op: %s", why)
        if options.load_cache is not None:
            logger.info("load_cache is not used: weights are packed for step programs only")
        return None


def _with_traced(plan: ModelPlan) -> BuiltModel:
    if plan.options.runner == "eager":
        raise Unsupported("runner is set to eager")
    if plan.platform is not None:
        raise Unsupported(f"step programs run on the CPU, not on {plan.build.device}")
    if plan.options.attention not in ("auto", "native"):
        raise Unsupported(f"attention is set to {plan.options.attention!r}")
    if plan.config.path == "transformers":
        raise Unsupported("the model runs through transformers")
    if not plan.config.causal and plan.options.kv_dtype != "model":
        raise Unsupported(f"cache.dtype={plan.options.kv_dtype}: the model has no KV cache")
    library = load_library()
    shape = pages_shape(plan.paged_config, plan.kv_shape, plan.options)
    pool = program_pool(
        plan.paged_config,
        with_paths(shape, plan.options),
        plan.build,
        plan.kv_type,
    )
    states = plan.states.tensors(plan.build.device) if plan.states is not None else None
    held = states.parts if states is not None else ()
    model = deferred_model(plan)
    names = plan.names(model)
    plan.adapt(model)
    if plan.options.deterministic:
        make = tracers(plan.limits, pool, library, plan.build.dtype, held)
        left = host_calls(model, make, plan.stage)
        if left:
            raise Unsupported(f"PyTorch computes {left}")
    kept = packed_weight_file(plan, library.variant)
    runner = ProgramRunner(
        model,
        plan.limits,
        pool,
        library,
        dtype=plan.build.dtype,
        threads=plan.threads,
        hidden_layers=plan.hidden_layers,
        edits_inputs=plan.edits_inputs,
        kept=kept,
        stage=plan.stage,
        states=held,
    )
    attention, name, changed = NativeAttention(), f"program ({library.variant})", _nothing
    if runner.host_calls:
        attention = NativeTensorAttention(
            NativePagedAttention(library, plan.build.dtype, pool.layers)
        )
        name, changed = f"{name}, PyTorch in {runner.host_calls}", attention.clear_cache
    whole = not runner.host_calls and plan.stage.count == plan.build.mesh.tp.size == 1
    return BuiltModel(
        name,
        runner,
        pool,
        attention,
        library,
        exact=not runner.host_calls,
        weights=plan.live(model, names, runner.copies, changed),
        buffers=runner.buffers,
        program=runner.costs,
        states=states,
        kept=kept,
        weight_bytes=runner.weight_bytes if whole else 0,
    )


def _nothing() -> None:
    """Do nothing: no cache depends on the weights."""


def _with_tensors(plan: ModelPlan) -> BuiltModel:
    mesh = replace(plan.build.mesh, same_bits=False)  # PyTorch's sums depend on the batch anyway
    plan = replace(plan, build=replace(plan.build, mesh=mesh))
    if plan.kv_type in SCALED:
        raise ConfigError(
            f"cache.dtype={plan.options.kv_dtype} needs a step program on the CPU; leave it at "
            "model"
        )
    attention = choose_attention(plan, plan.platform)
    if not plan.config.causal:
        attention = NullAttention()  # encoder layers attend without the KV cache
    layers = plan.hidden_layers
    model, native, weights = _with_kernels(plan)
    name, library = (native.name, native.library) if native else ("eager", None)
    after = plan.stage.last_layer
    runner = EagerRunner(model, hidden_layers=layers, on_head=plan.on_head, stream_after=after)
    if native and native.pool and native.attention:
        return BuiltModel(name, runner, native.pool, native.attention, library, weights=weights)
    shape = with_paths(pages_shape(plan.paged_config, plan.kv_shape, plan.options), plan.options)
    pool = tensor_pool(plan.paged_config, shape, plan.build, plan.kv_type, plan.platform)
    return BuiltModel(name, runner, pool, attention, library, weights=weights)


def _with_kernels(plan: ModelPlan) -> tuple[Any, NativeKernels | None, LiveWeights | str]:
    """Build a model that runs on tensors; return it, its native kernels, and its weights.

    The kernels are None if they are unavailable or disabled.
    """
    options, dtype = plan.options, plan.build.dtype
    if plan.platform or options.runner == "eager":
        model = loaded_model(plan)
        weights = plan.live(model, plan.names(model))
        plan.adapt(model)
        return model, None, weights
    attends = options.attention == "auto" and plan.kv_type == dtype and plan.config.kv_layers
    shape = with_paths(pages_shape(plan.paged_config, plan.kv_shape, options), options)
    pages = (plan.paged_config, shape) if attends and plan.config.causal else None
    if plan.config.path == "transformers":
        return _with_kernels_inside(plan, pages)
    model = deferred_model(plan)
    names = plan.names(model)
    plan.adapt(model)
    native = use_layer_kernels(model, dtype, plan.threads, pages)
    load_deferred(model)
    if native is None:
        return model, None, plan.live(model, names)
    return model, native, plan.live(model, names, native.copies, native.clear_cache)


def _with_kernels_inside(
    plan: ModelPlan, pages: tuple[ModelConfig, KVShape] | None
) -> tuple[Any, NativeKernels | None, LiveWeights | str]:
    """As `_with_kernels`, for models of the transformers library."""
    from sylvan.runtime.executor.graphs.hf_acceleration import use_kernels  # for these models only
    from sylvan.runtime.executor.graphs.origins import Origins

    model = loaded_model(plan)
    plan.adapt(model)
    origins = Origins(model)
    native = use_kernels(model, plan.build.dtype, plan.threads, pages, origins)
    if native is None:
        return model, None, plan.live(model, plan.names(model))
    packed = origins.holders(native.copies)
    holders = with_tensors(model, slots(plan.skeleton()), packed, origins.lost)
    return model, native, plan.live_in(holders, native.clear_cache)


def _open(device: str) -> Platform:
    kinds = load_kinds()
    if device not in kinds:
        raise ConfigError(f"device={device} is unknown; choose one of {', '.join(kinds)}")
    return open_platform(kinds[device])


def _on_device(
    plan: ModelPlan, platform: Platform, parts: ExecutorParts, facts: LoadedModelInfo
) -> tuple[Executor, LoadedModelInfo]:
    """Build the executor of a device: steps are queued, and decoding replays captured graphs."""
    from sylvan.runtime.executor.device.build import DevicePlan, build_device  # not on a CPU

    options = plan.options
    deferred = DeferredParts()
    attention = choose_attention(plan, platform)
    if options.kv_dtype not in attention.caps.kv_dtypes:
        raise ConfigError(
            f"cache.dtype={options.kv_dtype}: {type(attention).__name__} does not read such pages; "
            "install triton (pip install 'sylvan[gpu]'), or leave cache.dtype at model"
        )

    def shape_of(pages: int) -> KVShape:
        return pages_shape(plan.config, replace(plan.kv_shape, num_pages=pages), options)

    def make_pool(pages: int) -> KVCachePool:
        pool = tensor_pool(plan.config, shape_of(pages), plan.build, plan.kv_type, platform)
        deferred.pages = pool.groups  # the pool that is used
        return pool

    platform.trim()
    before = platform.memory()
    can_graph = attention.caps.graph_capture and platform.graph() is not None
    if options.runner == "graph" and not can_graph:
        raise ConfigError(
            f"runner=graph: {options.device} with attention={options.attention} captures no "
            "graphs; leave both at auto"
        )
    graph = can_graph and options.runner != "eager"
    try:
        model = loaded_model(plan)
        weights = plan.live(model, plan.names(model))
        workers = worker_halves(plan, parts, deferred)
        adapter_of(workers)(model)
        states, holds = device_states(plan)
        num_states = states.num_slots if states else 0
        executor, report = build_device(
            DevicePlan(
                platform=platform,
                before=before,
                model=model,
                limits=plan.limits,
                context_len=plan.build.length,
                attention=attention,
                make_pool=make_pool,
                kv_groups=lambda pages: cache_groups(plan.config, shape_of(pages), num_states),
                states=states,
                page_bytes=_page_bytes(plan),
                num_pages=None if options.fill else options.num_pages,
                max_pages=options.max_pages,
                vocab_size=plan.config.vocab_size,
                table_rows=plan.config.table_rows,
                media_ids=plan.config.media_ids,
                graph=graph and holds,
                capabilities=workers,
                custom=tuple(parts.custom),
                weights=weights,
                checkpoints=plan.checkpoints,
                on_built=deferred.built,
                ranks=plan.build.mesh.tp,
            )
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"too little memory on {options.device} ({size_text(before.free)} free of "
            f"{size_text(before.total)}): {str(error).splitlines()[0]} Lower cache.memory, "
            "scheduler.max_batch_tokens or scheduler.max_running_reqs, or choose a smaller model"
        ) from None
    if options.runner == "graph" and not report.has_graphs:
        raise ConfigError("runner=graph: this model's steps cannot be captured; leave it at auto")
    deferred.groups = executor.caps.kv_groups
    runner = "graph" if report.has_graphs else "eager"
    shape = shape_of(report.num_pages)
    kv_bytes = (report.num_pages - 1) * report.page_bytes
    facts = replace(facts, runner=runner, num_states=num_states)
    return executor, replace(facts, num_pages=shape.num_pages, kv_bytes=kv_bytes)


def _page_bytes(plan: ModelPlan) -> int:
    whole = plan.kv_shape.bytes_per_page(plan.kv_type)
    return whole // 2 if plan.config.latent else whole  # values are part of latent keys
