"""Builds a JAX runner from a model plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from torch import nn

from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.binding import Constants
from sylvan.kernels.native.graph import Graph, ProgramLimits
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.opset import MoeAlign
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.paged.cache import PAGE_MULTIPLE, LayerPages, PageShape, allocate_pages
from sylvan.kernels.xla import attention
from sylvan.kernels.xla.attention import Attend
from sylvan.kernels.xla.pallas import PallasAttend
from sylvan.kernels.xla.program import Edit, LoweredProgram, OutputBuffers
from sylvan.kernels.xla.sharded import ShardedAttend
from sylvan.kernels.xla.values import Weights
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.jnp import JnpAttention
from sylvan.runtime.attention.pallas import PallasAttention
from sylvan.runtime.core.step import EMBEDDINGS
from sylvan.runtime.executor.division import why_together
from sylvan.runtime.executor.graphs.partial import host_modules
from sylvan.runtime.executor.graphs.program import Traced, trace
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.parts import BuiltModel, ModelPlan
from sylvan.runtime.executor.pools import pages_shape, with_paths
from sylvan.runtime.executor.xla.functions import LoadedProgram, StepFunctions
from sylvan.runtime.executor.xla.memory import XlaMemory, log_memory, memory_of
from sylvan.runtime.executor.xla.modules import TorchModules, inner_programs
from sylvan.runtime.executor.xla.rotary import RotaryTables
from sylvan.runtime.executor.xla.runner import StepExtras, XlaRunner
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBuckets
from sylvan.runtime.executor.xla.weights import AXIS, DATA, load_tensors, load_weights
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.pool.mha import KVShape

logger = logging.getLogger(__name__)

_CONSTANTS = Constants(
    kv_chunk=1, query_tile=1, row_pad=32, max_head=1024, max_experts=4096, max_chosen=64
)
"""Tracing has no limits from the native library."""
_NO_WEIGHTS = "weights on JAX can be neither read nor updated while serving"
_ELSEWHERE = "serve this model with device=cpu"


def build_lowered(plan: ModelPlan, model: Any) -> BuiltModel:
    """Trace the model, load its weights onto the devices and compile all functions.

    Args:
        plan: Its platform uses JAX devices.
        model: The model; its matrices may not be loaded yet.

    Raises:
        ConfigError: the model or an option is not supported; the message names it.
    """
    _check(plan)
    assert plan.platform is not None
    name, options = plan.platform.facts.name, plan.options
    mesh = _mesh(name, options)
    shape = with_paths(pages_shape(plan.config, plan.kv_shape, options), options)
    chosen = options.attention if options.attention != "auto" else _attention_of(name)
    try:
        lowered = _lower(plan, model, shape, _attend(chosen, mesh))
        weights = load_weights(lowered.whole, mesh)
    except Unsupported as why:
        raise ConfigError(f"device={name}: {why}; {_ELSEWHERE}") from None
    cross = lowered.modules.cross if lowered.modules is not None else {}
    memory = memory_of(plan, mesh, shape, lowered.adapters, cross)
    use, buckets = BucketUse(), StepBuckets(plan.limits)
    sizes = plan.config.hidden_size, lowered.num_logits
    loaded = LoadedProgram(lowered.program, weights, *sizes)
    if lowered.modules is not None:
        loaded = _with_tensors((name, lowered), loaded, memory, (mesh, buckets))
    tables = _rotary_tables(plan, model, lowered, loaded.weights, mesh)
    log_memory(loaded.weights, memory)
    functions = StepFunctions(loaded, memory, mesh, buckets, use)
    functions.warm_up()
    extras = StepExtras(memory.adapters, lowered.edits, tables, memory.items)
    runner = XlaRunner(functions, buckets, plan.hidden_layers, lowered.loads, use, extras)
    backend = JnpAttention() if chosen == "jnp" else PallasAttention()
    return BuiltModel(
        f"program (jax on {_where(mesh)})",
        runner,
        memory.pool,
        backend,
        _library(),
        weights=_NO_WEIGHTS,
        use=use.numbers,
        states=memory.states,
    )


def _where(mesh: Mesh) -> str:
    """Names the devices."""
    found, groups = jax.default_backend(), mesh.shape[DATA]
    if mesh.size > 1:
        found += f", {mesh.size} devices"
    return f"{found} in {groups} groups with different requests" if groups > 1 else found


def _attend(chosen: str, mesh: Mesh) -> Attend:
    attend: Attend = attention.attend
    if chosen == "pallas":
        attend = PallasAttend(interpret=jax.default_backend() != "tpu")
    return ShardedAttend(attend, mesh, AXIS) if mesh.shape[AXIS] > 1 else attend


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A traced model.

    Attributes:
        program: The program, to be compiled by bucket.
        whole: All ops that read weights, those inside host calls included.
        num_logits: Columns of the logits.
        loads: Counters of rows per expert.
        adapters: Layers with adapters, by the number of the constant that describes them.
        edits: Layers whose outputs a step may replace or change by given vectors.
        modules: Modules that PyTorch computes; None: every module has ops.
        not_divided: Why the model is a single host call instead of blocks; empty if it has blocks.
    """

    program: LoweredProgram
    whole: Graph
    num_logits: int
    loads: Sequence[np.ndarray]
    adapters: Mapping[int, LoraLayer]
    edits: Sequence[int]
    modules: TorchModules | None
    not_divided: str


def _lower(plan: ModelPlan, model: Any, shape: KVShape, attend: Attend) -> _Lowered:
    pages = _traced_pages(plan, shape)
    limits = ProgramLimits(
        max_tokens=plan.limits.max_tokens, max_outputs=plan.limits.max_sampled_rows
    )

    def tracer() -> NativeTracer:
        return NativeTracer(plan.build.dtype, limits, pages, _CONSTANTS)

    used, traced, called, not_divided = _traced(plan, model, tracer, edits=_edits_inputs(plan))
    inner = inner_programs(called, used)
    graph = used.graph
    whole = graph.with_ops([*graph.ops, *(op for part in inner for op in part.ops)])
    by_memory = _adapters_of(model)
    found = {
        number: by_memory[id(data)]
        for number, data in enumerate(graph.constants)
        if id(data) in by_memory
    }
    modules = None
    if called:
        groups = {layer: page.group for layer, page in pages.items()}
        modules = TorchModules(called, graph.functions, plan.build.dtype, groups)
        found |= modules.layers
    program = LoweredProgram(
        graph, _layers_of(graph, pages), _ends(traced, plan), attend, modules, whole.ops
    )
    for part in inner:
        part.run = program.run_inner
    edits = [layer for layer, _, _ in traced.edits]
    logits, loads = traced.logits.cols, _loads(whole)
    return _Lowered(program, whole, logits, loads, found, edits, modules, not_divided)


def _edits_inputs(plan: ModelPlan) -> bool:
    """Whether vectors may replace token embeddings; items of cross-attention never do."""
    media = plan.config.media
    return plan.edits_inputs and not (media is not None and media.cross)


def _traced(
    plan: ModelPlan, model: Any, make: Callable[[], NativeTracer], *, edits: bool
) -> tuple[NativeTracer, Traced, list[nn.Module], str]:
    """Trace the model; return also the modules that become host calls.

    A model that cannot be divided into blocks becomes a single host call between embedding and
    head. The last result says why, and is empty otherwise.
    """
    try:
        with host_modules(model, make(), attending=True) as called:
            tracer = make()
            return tracer, trace(model, tracer, plan.hidden_layers, edits_inputs=edits), called, ""
    except Unsupported as found:
        if plan.hidden_layers or edits:
            raise
        why = str(found)
    tracer, forward = make(), model.forward
    model.forward = lambda x, batch: x.tracer.host_call(x, forward)
    try:
        return tracer, trace(model, tracer), [model.layers, model.norm], why
    finally:
        del model.forward


def _adapters_of(model: nn.Module) -> Mapping[int, LoraLayer]:
    """Return the layers with adapters, keyed by the id of the memory that describes them.

    Their matrices are not packed, because no CPU kernel reads them.
    """
    found: dict[int, LoraLayer] = {}
    for module in model.modules():
        held = getattr(module, "lora", None)
        for layer in held if isinstance(held, tuple) else (held,):
            if isinstance(layer, LoraLayer):
                layer.packed = False
                found[id(layer.memory)] = layer
    return found


def _rotary_tables(
    plan: ModelPlan, model: nn.Module, lowered: _Lowered, weights: Weights, mesh: Mesh
) -> RotaryTables | None:
    """Return what copies rotary rows of image positions to the devices; None if not needed."""
    if not _edits_inputs(plan) or not plan.config.rope_axes:
        return None
    leaves = lowered.modules.leaves.tensors if lowered.modules is not None else ()
    layers = (part for part in model.modules() if isinstance(part, PagedAttention))
    ropes = {id(rope): rope.cos_sin for layer in layers if (rope := layer.rope) is not None}
    tables = RotaryTables(
        lowered.whole, weights, leaves, [*ropes.values()], plan.build.length, mesh
    )
    tables.copy()
    return tables


def _with_tensors(
    what: tuple[str, _Lowered],
    loaded: LoadedProgram,
    memory: XlaMemory,
    sizes: tuple[Mesh, StepBuckets],
) -> LoadedProgram:
    """Find the tensors that PyTorch modules read, and load them.

    Raises:
        ConfigError: a module calls a function that has no lowering; the message names it.
    """
    (name, lowered), (mesh, buckets), modules = what, sizes, what[1].modules
    assert modules is not None
    functions = StepFunctions(loaded, memory, mesh, buckets, BucketUse())
    by_kind = {bucket.decodes: bucket for bucket in buckets}
    try:
        for bucket in by_kind.values():
            functions.shape_of(bucket)
    except Unsupported as why:
        before = f"{lowered.not_divided}, and " if lowered.not_divided else ""
        raise ConfigError(f"device={name}: {before}{why}; {_ELSEWHERE}") from None
    modules.found()
    return replace(loaded, weights=load_tensors(loaded.weights, modules.leaves.tensors, mesh))


def _check(plan: ModelPlan) -> None:
    options, name = plan.options, plan.options.device
    together = why_together(plan.config) if options.data_groups > 1 else ""
    lacks: Mapping[str, bool] = {
        "runner=eager: JAX runs step programs only; leave runner at auto": (
            options.runner not in ("auto", "program")
        ),
        "deterministic=true: results of XLA depend on the batch; leave it at auto": (
            options.deterministic
        ),
        f"the model runs through transformers; {_ELSEWHERE}": plan.config.path == "transformers",
        "its layers attend to any number of images, and compiled functions need a limit; "
        f"{_ELSEWHERE}": bool(
            plan.config.media and plan.config.media.cross and not plan.config.media.one
        ),
        "quantization: JAX expands matrices to the type of activations, so quantisation saves "
        "nothing; leave it at none": options.quantization is not None,
        f"cache.page_size={options.page_size}: JAX needs a multiple of {PAGE_MULTIPLE}": bool(
            options.page_size % PAGE_MULTIPLE
        ),
        f"parallel.attention_dp={options.data_groups}: {plan.config.architecture} {together}, and "
        "groups of devices cannot have different requests; use parallel.attention_dp=1": bool(
            together
        ),
        f"load_cache stores weights packed for CPUs; omit it with device={name}": (
            options.load_cache is not None
        ),
    }
    for why, is_so in lacks.items():
        if is_so:
            raise ConfigError(f"device={name}: {why}")


def _mesh(name: str, options: LocalOptions) -> Mesh:
    """Return the mesh of the first JAX devices, (groups of requests, devices of a group).

    Raises:
        ConfigError: there are fewer devices.
    """
    found, count = jax.devices(), options.devices
    if len(found) < count:
        raise ConfigError(
            f"parallel.devices={count}: JAX sees {len(found)} devices with device={name}; lower "
            "it (or split the CPU into N by XLA_FLAGS=--xla_force_host_platform_device_count=N)"
        )
    return Mesh(np.array(found[:count]).reshape(options.data_groups, -1), (DATA, AXIS))


def _attention_of(name: str) -> str:
    return "pallas" if name == "tpu" else "jnp"


def _traced_pages(plan: ModelPlan, shape: KVShape) -> Mapping[int, LayerPages]:
    """Return the layers' pages without memory, which give shapes to the trace."""
    if not plan.config.causal:
        return {}
    latent = plan.config.latent.latent if plan.config.latent else None
    index = plan.config.latent.index if plan.config.latent else 0
    page = PageShape(
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim - index,
        value_dim=index or latent or shape.head_dim,
        shared=latent is not None and not index,
        tokens=index > 0,
        page_size=shape.page_size,
        dtype=plan.build.dtype,
    )
    found: dict[int, LayerPages] = {}
    for number, group in enumerate(shape.kv_groups):
        pages = allocate_pages(page, 1, len(group.layers), number)
        found |= dict(zip(group.layers, pages.layers, strict=True))
    return found


def _layers_of(graph: Graph, pages: Mapping[int, LayerPages]) -> Mapping[int, int]:
    """Map each constant that holds a layer's keys to the layer."""
    layers = {id(page.keys): layer for layer, page in pages.items()}
    numbered = enumerate(graph.constants)
    return {number: layers[id(data)] for number, data in numbered if id(data) in layers}


def _ends(traced: Traced, plan: ModelPlan) -> OutputBuffers:
    return OutputBuffers(
        hidden=traced.hidden.id,
        taken=traced.taken.id,
        logits=traced.logits.id,
        layers=[traced.layers[layer].id for layer in plan.hidden_layers],
        head=traced.take + 1,
        edits=[
            Edit(value.id, segment, adds=layer != EMBEDDINGS)
            for layer, segment, value in traced.edits
        ],
    )


def _loads(graph: Graph) -> list[np.ndarray]:
    """Counters of rows per expert, which the model exposes."""
    found: list[np.ndarray] = []
    for op in graph.ops:
        if isinstance(op, MoeAlign):
            data = graph.constants[~op.load]
            assert data is not None
            found.append(data.view(np.int64)[: op.num_experts])
    return found


def _library() -> Any:
    """The native library, if there is one: it samples rows whose logits are edited."""
    try:
        return load_library()
    except LibraryMissing:
        return None
