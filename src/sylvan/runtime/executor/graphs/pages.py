"""The KV pool of step programs: pages in the order that the native attention reads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.paged.cache import PAGE_MULTIPLE, LayerPages, PageShape
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.pool.mha import KVShape


class NativePool:
    """Implements `KVCachePool` but for `layer` and `store`, which only tensors need.

    Exported pages lie one after another; each holds, layer by layer, its keys then its values in
    kernel order. That order depends on the dtype only, never on the CPU.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        *,
        int8: bool = False,
        latent: int | None = None,
    ) -> None:
        """Memory is reserved here, and becomes resident when first written.

        Args:
            shape: What is kept.
            dtype: Of the model's rows.
            int8: Keep keys and values as int8, with a scale for each token and head.
            latent: Columns of the keys that are the values: of latent attention.

        Raises:
            Unsupported: no kernel for this page size or dtype.
        """
        if shape.page_size % PAGE_MULTIPLE:
            raise Unsupported(f"pages of {shape.page_size} tokens: not a multiple of 16")
        if int8 and latent:
            raise Unsupported("latent keys of int8")
        if dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"keys and values of {dtype}")
        self.num_pages = shape.num_pages
        self.page_size = shape.page_size
        page = PageShape(
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=latent or shape.head_dim,
            shared=latent is not None,
            page_size=shape.page_size,
            dtype=dtype,
            int8=int8,
        )
        self._layers = [LayerPages(page, shape.num_pages) for _ in range(shape.num_layers)]

    @property
    def layers(self) -> Mapping[int, LayerPages]:
        """Pages of each attention layer, by its index."""
        return dict(enumerate(self._layers))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Not offered: the pages are in kernel order."""
        raise NotImplementedError("the pages of a step program cannot be read as tensors")

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Not offered: programs store by themselves."""
        raise NotImplementedError("the pages of a step program cannot be written as tensors")

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVCachePool.copy`. Copies the whole page: what follows `num_tokens` is not read."""
        for layer in self._layers:
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]

    def move(self, sources_N: IntArray, targets_N: IntArray) -> None:
        """Not offered: step programs verify no trees of guesses."""
        raise NotImplementedError("step programs verify no trees of guesses")

    def export_pages(self, pages: IntArray) -> memoryview:
        """See `KVCachePool.export_pages`."""
        sides = [x[pages] for layer in self._layers for x in (layer.keys, layer.values)]
        return np.concatenate(sides, axis=1).data.cast("B")

    def import_pages(self, pages: IntArray, data: memoryview) -> None:
        """See `KVCachePool.import_pages`."""
        whole = np.frombuffer(data, np.uint8).reshape(len(pages), -1)
        start = 0
        for layer in self._layers:
            for side in (layer.keys, layer.values):
                side[pages] = whole[:, start : start + side.shape[1]]
                start += side.shape[1]
        assert start == whole.shape[1], "bytes of another layout"
