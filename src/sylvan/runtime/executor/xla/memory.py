"""Device memory of steps on JAX, besides weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch
from jax.sharding import Mesh

from sylvan.config.fields import size_text
from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.xla.program import ProgramMemory, ReadArrays
from sylvan.kernels.xla.values import DTYPES, Weights
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.parts import ModelPlan
from sylvan.runtime.executor.xla.adapters import XlaAdapters
from sylvan.runtime.executor.xla.inputs import InputKinds
from sylvan.runtime.executor.xla.items import XlaItems
from sylvan.runtime.executor.xla.pool import XlaPool
from sylvan.runtime.executor.xla.states import XlaStates
from sylvan.runtime.executor.xla.weights import AXIS
from sylvan.runtime.layers.cross import CrossAttention
from sylvan.runtime.pool.mha import KVShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class XlaMemory:
    """Arrays that steps replace (pages, states), and those they only read (adapters, items)."""

    pool: XlaPool
    states: XlaStates | None
    adapters: XlaAdapters
    items: XlaItems | None = None

    @property
    def kinds(self) -> InputKinds:
        """Which inputs the model's steps have."""
        states = self.states
        slots = 0 if states is None else states.num_slots + states.num_branches
        return InputKinds(
            len(self.pool.groups),
            slots,
            self.adapters.rows is not None,
            self.items is not None,
            self.pool.shards,
        )

    def take(self) -> ProgramMemory:
        """Return the arrays; a step consumes them and must `put` those it returns."""
        states = self.states.arrays if self.states is not None else {}
        return ProgramMemory(
            dict(self.pool.arrays), {part: found[0] for part, found in states.items()}
        )

    @property
    def read(self) -> ReadArrays:
        """Return the inputs that a step reads and does not change."""
        return ReadArrays(
            self.adapters.arrays, {} if self.items is None else dict(self.items.arrays)
        )

    def put(self, memory: ProgramMemory) -> None:
        """Replace all arrays."""
        self.pool.arrays.update(memory.pages)
        if self.states is not None:
            self.states.arrays.update({part: (x, None) for part, x in memory.states.items()})


def memory_of(
    plan: ModelPlan,
    mesh: Mesh,
    shape: KVShape,
    adapters: Mapping[int, LoraLayer],
    cross: Mapping[int, CrossAttention],
) -> XlaMemory:
    """Allocate pages, states and slots.

    Args:
        plan: Plan of the model.
        mesh: The devices.
        shape: Shape of the pages of each group of devices.
        adapters: Layers for adapters, see `XlaAdapters`.
        cross: Layers that attend to encoded items, see `XlaItems`.

    Raises:
        ConfigError: the pages do not fit.
    """
    latent = plan.config.latent.latent if plan.config.latent else None
    _check_memory(plan, mesh, shape)
    kind: Any = DTYPES["bf16" if plan.build.dtype == torch.bfloat16 else "f32"]
    if not plan.config.causal:
        shape = replace(shape, num_layers=0, groups=())  # empty pages, only counted
    states = XlaStates(plan.states, mesh) if plan.states is not None else None
    items = None
    if cross:
        slots, most = plan.options.max_running_reqs, _max_vectors(plan)
        items = XlaItems(cross, slots, most, plan.build.dtype, mesh)
    return XlaMemory(XlaPool(shape, kind, mesh, latent), states, XlaAdapters(adapters, mesh), items)


def _max_vectors(plan: ModelPlan) -> int:
    """Maximum vectors of an encoded item: config.json's for audio, the prompt limit for texts."""
    media, raw = plan.config.media, plan.config.raw
    assert media is not None
    sounds = raw.get("max_source_positions")
    return media.encoder_len or (sounds if isinstance(sounds, int) else plan.build.length)


def _check_memory(plan: ModelPlan, mesh: Mesh, shape: KVShape) -> None:
    """Reject pages that do not fit next to the weights, on devices that report their memory.

    Raises:
        ConfigError: they do not fit; the message says how much memory is free.
    """
    pages = shape.num_pages * shape.bytes_per_page(plan.kv_type)
    devices = mesh.shape[AXIS]
    needed = pages // (1 if shape.num_kv_heads % devices else devices)
    for device in mesh.devices.flat:
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        if stats.get("bytes_limit") and needed > free:
            raise ConfigError(
                f"the KV cache takes {size_text(needed)} of {device}, which has {size_text(free)} "
                "free besides the weights; lower cache.memory or raise parallel.devices"
            )


def log_memory(weights: Weights, memory: XlaMemory) -> None:
    """Log the memory of one device; what XLA needs in addition is known after compiling."""
    taken = memory.take()
    parts = {
        "weights": weights,
        "KV pages": taken.pages,
        "recurrent states": taken.states,
        "adapters": memory.read.adapters,
        "encoded items": memory.read.items,
    }
    sizes = {
        name: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(arrays))
        for name, arrays in parts.items()
    }
    logger.info(
        "each device holds %s",
        ", ".join(f"{size_text(size)} of {name}" for name, size in sizes.items() if size),
    )
