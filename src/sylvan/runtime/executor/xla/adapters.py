"""Adapters on JAX devices: the matrices of all slots of each layer, padded to one rank.

Shapes: L slots, P parts, R rank, E experts, K inputs, N outputs of a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.adapters import Factors, LoraLayer, LoraRows
from sylvan.kernels.xla.values import LoraStack
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.executor.xla.weights import to_numpy


class XlaAdapters:
    """Copies adapters from the layers' slots to the devices, before the steps that use them.

    Args:
        layers: Layers with adapters, by the number of the program constant that describes them.
        mesh: The devices; each has all adapters.

    Attributes:
        arrays: The arrays that a step reads, by the same numbers.
    """

    def __init__(self, layers: Mapping[int, LoraLayer], mesh: Mesh) -> None:
        self._layers = layers
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._seen = dict.fromkeys(layers, 0)
        self._content: dict[tuple[int, int], tuple[object, ...]] = {}
        self._fill = jax.jit(_filled, donate_argnums=0, out_shardings=self._whole)
        self.arrays = {number: self._empty(layer) for number, layer in layers.items()}

    @property
    def rows(self) -> LoraRows | None:
        """Rows of the step with adapters; None if no layer of the model takes adapters."""
        return next((layer.rows for layer in self._layers.values()), None)

    def slots_of(self, rows: IntArray) -> IntArray:
        """Adapter slots of rows of the step, int32; -1: none."""
        return np.zeros(0, np.int32) if self.rows is None else self.rows.slot_of_row[rows]

    def warm_up(self) -> None:
        """Compile the copies before serving."""
        for number, layer in self._layers.items():
            self._put(number, layer, 0)

    def refresh(self) -> None:
        """Copy slots that were filled or emptied since the last step."""
        for number, layer in self._layers.items():
            if layer.changes == self._seen[number]:
                continue
            self._seen[number] = layer.changes
            for slot in range(layer.rows.num_slots):
                content = _content(layer, slot)
                known = self._content.get((number, slot), ())
                if [*map(id, content)] != [*map(id, known)]:
                    self._content[number, slot] = content
                    self._put(number, layer, slot)

    def _put(self, number: int, layer: LoraLayer, slot: int) -> None:
        new = jax.device_put(_matrices(layer, slot), self._whole)
        where = jax.device_put(np.int32(slot), self._whole)
        self.arrays[number] = self._fill(self.arrays[number], where, new)

    def _empty(self, layer: LoraLayer) -> LoraStack:
        one = _matrices(layer, 0)
        count = layer.rows.num_slots
        stack: Any = (
            np.repeat(one.down[:, :, None], count, 2),
            tuple(np.repeat(up[:, None], count, 1) for up in one.up),
            np.repeat(one.scales[:, None], count, 1),
        )
        return jax.device_put(LoraStack(*stack), self._whole)


def _content(layer: LoraLayer, slot: int) -> tuple[Factors | None, ...]:
    experts = range(layer.shape.num_experts)
    return tuple(part for expert in experts for part in layer.factors(slot, expert))


def _filled(stack: LoraStack, slot: jax.Array, new: LoraStack) -> LoraStack:
    return LoraStack(
        stack.down.at[:, :, slot].set(new.down),
        tuple(up.at[:, slot].set(part) for up, part in zip(stack.up, new.up, strict=True)),
        stack.scales.at[:, slot].set(new.scales),
    )


def _matrices(layer: LoraLayer, slot: int) -> LoraStack:
    """One slot as numpy arrays: down (E, K, P, R), up (E, R, N) of each part, scales (E, P)."""
    kind: Any = jnp.bfloat16 if layer.dtype == torch.bfloat16 else np.float32
    experts, parts, rank = layer.shape.num_experts, len(layer.outputs), layer.rows.max_rank
    down = np.zeros((experts, layer.inputs, parts, rank), kind)
    up = [np.zeros((experts, rank, size), kind) for size in layer.outputs]
    scales = np.zeros((experts, parts), np.float32)
    for expert in range(experts):
        for part, factors in enumerate(layer.factors(slot, expert)):
            if factors is not None:
                down[expert, :, part, : factors.rank] = to_numpy(factors.down.contiguous()).T
                up[part][expert, : factors.rank] = to_numpy(factors.up.contiguous()).T
                scales[expert, part] = factors.scale
    found: Any = down, tuple(up), scales  # still on the host
    return LoraStack(*found)
