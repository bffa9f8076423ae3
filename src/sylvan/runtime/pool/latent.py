"""Compressed KV of latent attention: one wide head per token; its first columns are the value."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.pool.mha import KVShape, fitted, move_rows
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.transfers import Transfers


class LatentPool:
    """Implements `KVCachePool`: one tensor (L, P, page_size, 1, C) for each group of L layers.

    A page has L regions. An exported page has one layer after another, token by token.
    """

    def __init__(
        self,
        shape: KVShape,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        transfers: Transfers | None = None,
    ) -> None:
        """Allocate zeroed pages: masked keys are still multiplied, and 0 * NaN is not 0."""
        assert shape.num_kv_heads == 1
        self.page_size, self.layer_groups = shape.page_size, shape.layer_groups
        self.groups: Sequence[PagedBuffer] = []
        self._value_dim = value_dim
        self._layers: dict[int, torch.Tensor] = {}
        for group in shape.kv_groups:
            columns = group.head_dim or shape.head_dim
            size = (len(group.layers), group.num_pages, shape.page_size, 1, columns)
            whole = torch.zeros(size, dtype=dtype, device=device)
            self._layers.update(zip(group.layers, whole, strict=True))
            memory = whole.flatten(2).view(torch.uint8)
            self.groups.append(PagedBuffer(memory, shape.page_size, transfers=transfers))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, and values that are a view of them."""
        keys = self._layers[index]
        return keys, keys[..., : self._value_dim]

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Store keys; values are part of them."""
        layer = self._layers[index]
        layer.flatten(0, 1)[slots_T.long()] = fitted(k_TKH, layer.dtype)

    def move(self, group: int, sources_N: IntArray, targets_N: IntArray) -> None:
        layers = [x for i, x in self._layers.items() if self.layer_groups[i] == group]
        move_rows(layers, sources_N, targets_N)
