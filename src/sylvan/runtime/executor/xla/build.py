"""Builds a JAX runner from a model plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from sylvan.config.fields import size_text
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
from sylvan.kernels.xla.program import Ends, LoweredProgram
from sylvan.kernels.xla.sharded import ShardedAttend
from sylvan.kernels.xla.values import DTYPES
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.jnp import JnpAttention
from sylvan.runtime.attention.pallas import PallasAttention
from sylvan.runtime.executor.graphs.program import Traced, trace
from sylvan.runtime.executor.parts import BuiltModel, ModelPlan
from sylvan.runtime.executor.pools import pages_shape, with_paths
from sylvan.runtime.executor.xla.functions import LoadedProgram, StepFunctions
from sylvan.runtime.executor.xla.pool import XlaPool
from sylvan.runtime.executor.xla.runner import XlaRunner
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBuckets
from sylvan.runtime.executor.xla.weights import AXIS, load_weights
from sylvan.runtime.pool.mha import KVShape

logger = logging.getLogger(__name__)

_CONSTANTS = Constants(
    kv_chunk=1, query_tile=1, row_pad=32, max_head=1024, max_experts=4096, max_chosen=64
)
"""Tracing has no limits from the native library."""
_NO_WEIGHTS = "weights on JAX can be neither read nor updated while serving"
_ELSEWHERE = "serve this model with device=cpu"


def build_lowered(plan: ModelPlan, model: Any) -> BuiltModel:
    """Trace the model, load its weights onto the devices, and compile all functions.

    Args:
        plan: Its platform uses JAX devices.
        model: The model; its matrices may not be loaded yet.

    Raises:
        ConfigError: the model or an option is not supported; the message names it.
    """
    options, config = plan.options, plan.config
    _check(plan)
    assert plan.platform is not None
    name = plan.platform.facts.name
    mesh = _mesh(name, options.devices)
    shape = with_paths(pages_shape(config, plan.kv_shape, options), options)
    pages = _traced_pages(plan, shape)
    limits = ProgramLimits(max_tokens=plan.limits.max_tokens, max_outputs=plan.limits.most_samples)
    tracer = NativeTracer(plan.build.dtype, limits, pages, _CONSTANTS)
    chosen = options.attention if options.attention != "auto" else _attention_of(name)
    attend: Attend = attention.attend
    if chosen == "pallas":
        attend = PallasAttend(interpret=jax.default_backend() != "tpu")
    if mesh.size > 1:
        attend = ShardedAttend(attend, mesh, AXIS)
    try:
        traced = trace(model, tracer, plan.hidden_layers)
        layers = _layers_of(tracer.graph, pages)
        program = LoweredProgram(tracer.graph, layers, _ends(traced, plan), attend)
        graph = tracer.graph
        weights = load_weights(graph, mesh)
    except Unsupported as why:
        raise ConfigError(f"device={name}: {why}; {_ELSEWHERE}") from None
    latent = config.latent.latent if config.latent else None
    _check_memory(plan, mesh, shape)
    kind: Any = DTYPES["bf16" if plan.build.dtype == torch.bfloat16 else "f32"]
    if not config.causal:
        shape = replace(shape, num_layers=0, groups=())  # empty pages, only counted
    pool = XlaPool(shape, kind, mesh, latent)
    use, buckets = BucketUse(), StepBuckets(plan.limits)
    loaded = LoadedProgram(program, weights, config.hidden_size, traced.logits.cols)
    functions = StepFunctions(loaded, pool, mesh, buckets, use)
    functions.warm_up()
    runner = XlaRunner(functions, buckets, plan.hidden_layers, _loads(graph), use)
    backend = JnpAttention() if chosen == "jnp" else PallasAttention()
    where = (
        f"{jax.default_backend()}, {mesh.size} devices"
        if mesh.size > 1
        else (jax.default_backend())
    )
    return BuiltModel(
        f"program (jax on {where})",
        runner,
        pool,
        backend,
        _library(),
        weights=_NO_WEIGHTS,
        use=use.numbers,
    )


def _check(plan: ModelPlan) -> None:
    options, name = plan.options, plan.options.device
    lacks: Mapping[str, bool] = {
        "runner=eager: JAX runs step programs only; leave runner at auto": (
            options.runner not in ("auto", "program")
        ),
        "deterministic=true cannot be kept: XLA's bits depend on the batch; leave it at auto": (
            options.deterministic
        ),
        f"the model runs through transformers; {_ELSEWHERE}": plan.config.path == "transformers",
        f"recurrent layers have no lowering to JAX; {_ELSEWHERE}": bool(plan.config.states),
        f"images, videos and sounds have no lowering to JAX; {_ELSEWHERE}": plan.edits_inputs,
        "quantization: JAX expands matrices to the type of rows, so quantising them gains "
        "nothing; leave it at none": options.quantization is not None,
        f"cache.page_size={options.page_size}: JAX needs a multiple of {PAGE_MULTIPLE}": bool(
            options.page_size % PAGE_MULTIPLE
        ),
        f"load_cache stores weights packed for CPUs; omit it with device={name}": (
            options.load_cache is not None
        ),
    }
    for why, is_so in lacks.items():
        if is_so:
            raise ConfigError(f"device={name}: {why}")


def _mesh(name: str, count: int) -> Mesh:
    """The first `count` JAX devices, along one axis.

    Raises:
        ConfigError: there are fewer devices.
    """
    found = jax.devices()
    if len(found) < count:
        raise ConfigError(
            f"parallel.devices={count}: JAX sees {len(found)} devices with device={name}; lower "
            "it (CPUs: XLA_FLAGS=--xla_force_host_platform_device_count=N makes N)"
        )
    return Mesh(np.array(found[:count]), (AXIS,))


def _attention_of(name: str) -> str:
    return "pallas" if name == "tpu" else "jnp"


def _traced_pages(plan: ModelPlan, shape: KVShape) -> Mapping[int, LayerPages]:
    """Pages without memory, which only give a tracer their shape: one per group."""
    if not plan.config.causal:
        return {}
    latent = plan.config.latent.latent if plan.config.latent else None
    page = PageShape(
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=latent or shape.head_dim,
        shared=latent is not None,
        page_size=shape.page_size,
        dtype=plan.build.dtype,
    )
    found: dict[int, LayerPages] = {}
    for number, group in enumerate(shape.kv_groups):
        pages = allocate_pages(page, 1, len(group.layers), number)
        found |= dict(zip(group.layers, pages.layers, strict=True))
    return found


def _layers_of(graph: Graph, pages: Mapping[int, LayerPages]) -> Mapping[int, int]:
    """Maps each constant that is a layer's keys to the layer."""
    layers = {id(page.keys): layer for layer, page in pages.items()}
    numbered = enumerate(graph.constants)
    return {number: layers[id(data)] for number, data in numbered if id(data) in layers}


def _ends(traced: Traced, plan: ModelPlan) -> Ends:
    return Ends(
        hidden=traced.hidden.id,
        taken=traced.taken.id,
        logits=traced.logits.id,
        layers=[traced.layers[layer].id for layer in plan.hidden_layers],
        head=traced.take + 1,
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


def _check_memory(plan: ModelPlan, mesh: Mesh, shape: KVShape) -> None:
    """Reject pages that do not fit next to the weights, on devices that report their memory.

    Raises:
        ConfigError: they do not fit; the message says how much memory is free.
    """
    pages = shape.num_pages * shape.bytes_per_page(plan.kv_type)
    needed = pages // (1 if shape.num_kv_heads % mesh.size else mesh.size)
    for device in mesh.devices.flat:
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        if stats.get("bytes_limit") and needed > free:
            raise ConfigError(
                f"the KV cache takes {size_text(needed)} of {device}, which has {size_text(free)} "
                "free beside the weights; lower cache.memory, or raise parallel.devices"
            )


def _library() -> Any:
    """The native library, if there is one: it samples rows whose logits are edited."""
    try:
        return load_library()
    except LibraryMissing:
        return None
