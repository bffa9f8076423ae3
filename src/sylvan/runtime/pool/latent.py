"""Compressed KV of latent attention: one wide head a token, whose first columns are the value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.pool.mha import KVShape, fitted


class LatentPool:
    """Implements `KVCachePool`; a layer is one tensor (num_pages, page_size, 1, C).

    Exported pages lie one after another; each holds its layers one after another.
    """

    def __init__(
        self,
        shape: KVShape,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Zeroed, because masked keys are still multiplied and 0 * NaN is not 0."""
        assert shape.num_kv_heads == 1
        self.num_pages, self.page_size = shape.num_pages, shape.page_size
        self._value_dim = value_dim
        size = (shape.num_pages, shape.page_size, 1, shape.head_dim)
        self._layers: Sequence[torch.Tensor] = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)
        ]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVCachePool.layer`; the values are a view of the keys."""
        keys = self._layers[index]
        return keys, keys[..., : self._value_dim]

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """See `KVCachePool.store`; the values are part of the keys."""
        layer = self._layers[index]
        layer.flatten(0, 1)[slots_T.long()] = fitted(k_TKH, layer.dtype)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVCachePool.copy`."""
        for tensor in self._layers:
            tensor[target, :num_tokens] = tensor[source, :num_tokens]

    def move(self, sources_N: IntArray, targets_N: IntArray) -> None:
        """See `KVCachePool.move`."""
        sources, targets = (torch.from_numpy(x.astype(np.int64)) for x in (sources_N, targets_N))
        for tensor in self._layers:
            rows = tensor.flatten(0, 1)
            rows[targets.to(rows.device)] = rows[sources.to(rows.device)]

    def export_pages(self, pages: IntArray) -> memoryview:
        """See `KVCachePool.export_pages`."""
        index = torch.from_numpy(pages.astype(np.int64))
        whole = torch.stack([x[index.to(x.device)] for x in self._layers], dim=1)
        return whole.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")

    def import_pages(self, pages: IntArray, data: memoryview) -> None:
        """See `KVCachePool.import_pages`."""
        tensor = self._layers[0]
        flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(tensor.dtype)
        whole = flat.view(len(pages), len(self._layers), *tensor.shape[1:]).to(tensor.device)
        index = torch.from_numpy(pages.astype(np.int64)).to(tensor.device)
        for i, target in enumerate(self._layers):
            target[index] = whole[:, i]
