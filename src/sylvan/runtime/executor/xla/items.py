"""Encoded items on JAX devices, for cross-attention: Whisper, BART, T5.

An item fills one slot: its keys and values of all layers, padded to the maximum number of vectors.
The host encodes the item and projects keys and values, once.

Shapes: S slots, N heads, V vectors of an item, H columns of a head, T rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.xla.values import Pages
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import CrossMemory, CrossSpan
from sylvan.runtime.executor.xla.weights import AXIS, to_numpy
from sylvan.runtime.layers.cross import CrossAttention

_MULTIPLE = 16  # attention kernels need a multiple of this many vectors


class XlaItems:
    """Copies items to the devices before the steps whose rows attend to them.

    Args:
        layers: Cross-attention layers, by layer of the model. Their projections of keys and values
            stay on the host.
        slots: Maximum items of a step: one per request.
        max_vectors: Maximum vectors of an item.
        dtype: Of the rows.
        mesh: The devices; heads are divided among those of a group.

    Attributes:
        arrays: Keys and values (S, N, V, H) by layer of the model.
    """

    def __init__(
        self,
        layers: Mapping[int, CrossAttention],
        slots: int,
        max_vectors: int,
        dtype: torch.dtype,
        mesh: Mesh,
    ) -> None:
        self._layers, self._slots, self._dtype = layers, slots, dtype
        self._max_vectors = max_vectors
        self._held: dict[CrossMemory, int] = {}  # slots, least recently used first
        kind: Any = jnp.bfloat16 if dtype == torch.bfloat16 else np.float32
        vectors = -(-max_vectors // _MULTIPLE) * _MULTIPLE
        heads = [layer.shape.num_heads for layer in layers.values()]
        divided = all(count % mesh.shape[AXIS] == 0 for count in heads)
        page = PartitionSpec(AXIS) if divided else PartitionSpec()
        sharding = NamedSharding(mesh, PartitionSpec(None, *page))
        self._page_sharding = NamedSharding(mesh, page)
        self._whole = NamedSharding(mesh, PartitionSpec())
        self.arrays: dict[int, Pages] = {}
        for number, layer in layers.items():
            size = slots, layer.shape.num_heads, vectors, layer.shape.head_dim
            pair = (jax.device_put(np.zeros(size, kind), sharding) for _ in range(2))
            self.arrays[number] = next(pair), next(pair)
        kept = jax.tree.map(lambda x: x.sharding, self.arrays)
        self._fill = jax.jit(_filled, donate_argnums=0, out_shardings=kept)

    def warm_up(self) -> None:
        """Compile the copy before serving."""
        self._put(0, {})

    def place(self, spans: Sequence[CrossSpan], rows: int) -> IntArray:
        """Copy the items of a step to slots; return each row's slot and its number of vectors.

        Returns: int32 (2, T); 0 vectors: the row attends to nothing.

        Raises:
            ValueError: an item has more vectors than the functions were compiled for.
        """
        found = np.zeros((2, rows), np.int32)
        memories = [memory for span in spans for memory in span.memories]
        for memory in memories:
            if memory in self._held:
                self._held[memory] = self._held.pop(memory)  # the last to be replaced
        for span in spans:
            [memory] = span.memories
            if memory not in self._held:
                self._copy(memory, memories)
            found[:, span.rows] = [[self._held[memory]], [len(memory.vectors_ND)]]
        return found

    def _copy(self, memory: CrossMemory, needed: Sequence[CrossMemory]) -> None:
        vectors_VD = memory.vectors_ND.to(self._dtype)
        if len(vectors_VD) > self._max_vectors:
            limit = self._max_vectors
            raise ValueError(f"an encoded item has {len(vectors_VD)} vectors; the limit is {limit}")
        slot = len(self._held)
        if slot == self._slots:
            slot = self._held.pop(next(old for old in self._held if old not in needed))
        with torch.inference_mode():
            pairs = {number: layer.project(vectors_VD) for number, layer in self._layers.items()}
        self._put(slot, pairs)
        self._held[memory] = slot

    def _put(self, slot: int, pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fill a slot with keys and values; layers without any get zeros."""
        new = {
            number: tuple(_page(side, given) for given in pairs.get(number, (None, None)))
            for number, (side, _) in self.arrays.items()
        }
        pages = jax.device_put(new, self._page_sharding)
        where = jax.device_put(np.int32(slot), self._whole)
        self.arrays = self._fill(self.arrays, where, pages)


def _page(side: jax.Array, given: torch.Tensor | None) -> np.ndarray:
    """Keys or values of an item, padded with zeros."""
    page = np.zeros(side.shape[1:], side.dtype)
    if given is not None:
        page[:, : given.shape[1]] = to_numpy(given.contiguous())
    return page


def _filled(
    arrays: Mapping[int, Pages], slot: jax.Array, new: Mapping[int, Pages]
) -> dict[int, Pages]:
    return jax.tree.map(lambda x, page: x.at[slot].set(page), arrays, new)
