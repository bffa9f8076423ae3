"""Keys and values of ordinary attention, one tensor a layer.

Shapes: T tokens, K key/value heads, H head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What a pool stores for each token, and how many pages of how many tokens it has."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int

    def bytes_per_page(self, dtype: torch.dtype) -> int:
        """Bytes of one page in all layers."""
        return (
            2
            * self.num_layers
            * self.page_size
            * self.num_kv_heads
            * self.head_dim
            * (dtype.itemsize)
        )


def bytes_of(numbers: int, dtype: torch.dtype, head_dim: int) -> int:
    """Bytes of so many numbers of keys and values; int8 ones have a scale for each head."""
    scales = numbers // head_dim if dtype == torch.int8 else 0
    return numbers * dtype.itemsize + 4 * scales


class MHAPool:
    """(num_pages, page_size, K, H) tensors for keys and for values of each layer.

    Exported pages lie one after another; each holds, layer by layer, its keys then its values,
    token by token.
    """

    def __init__(
        self, shape: KVShape, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Zeroed, because masked keys are still multiplied and 0 * NaN is not 0."""
        self.num_pages = shape.num_pages
        self.page_size = shape.page_size
        size = (shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self._keys = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)
        ]
        self._values = [torch.zeros_like(k) for k in self._keys]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVCachePool.layer`."""
        return self._keys[index], self._values[index]

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """See `KVCachePool.store`."""
        slots, dtype = slots_T.long(), self._keys[index].dtype
        self._keys[index].flatten(0, 1)[slots] = fitted(k_TKH, dtype)
        self._values[index].flatten(0, 1)[slots] = fitted(v_TKH, dtype)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVCachePool.copy`."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :num_tokens] = tensor[source, :num_tokens]

    def move(self, sources_N: IntArray, targets_N: IntArray) -> None:
        """See `KVCachePool.move`."""
        sources, targets = (torch.from_numpy(x.astype(np.int64)) for x in (sources_N, targets_N))
        for tensor in (*self._keys, *self._values):
            rows = tensor.flatten(0, 1)
            rows[targets.to(rows.device)] = rows[sources.to(rows.device)]

    def export_pages(self, pages: IntArray) -> memoryview:
        """See `KVCachePool.export_pages`."""
        index = torch.from_numpy(pages.astype(np.int64))
        sides = [x[index.to(x.device)] for pair in self._pairs() for x in pair]
        whole = torch.stack(sides, dim=1).cpu().contiguous()
        return whole.view(torch.uint8).numpy().data.cast("B")

    def import_pages(self, pages: IntArray, data: memoryview) -> None:
        """See `KVCachePool.import_pages`."""
        tensor = self._keys[0]
        shape = (len(pages), 2 * len(self._keys), *tensor.shape[1:])
        assert len(data) == math.prod(shape) * tensor.dtype.itemsize, "bytes of another layout"
        flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        whole = flat.view(tensor.dtype).view(shape).to(tensor.device)
        index = torch.from_numpy(pages.astype(np.int64)).to(tensor.device)
        for side, target in enumerate(x for pair in self._pairs() for x in pair):
            target[index] = whole[:, side]

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._keys, self._values, strict=True))


def fitted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to the type of a pool; what 8 bits cannot hold becomes the largest they can."""
    if dtype.itemsize > 1:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)
