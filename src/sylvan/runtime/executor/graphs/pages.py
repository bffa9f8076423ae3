"""The KV pool of step programs: pages in the layout that the native attention kernels read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.paged.cache import (
    PAGE_MULTIPLE,
    ROTATED_HEADS,
    LayerPages,
    PageShape,
    SmallNumbers,
    allocate_pages,
)
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.pool.mha import KVShape
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.transfers import HostTransfers


class NativePool:
    """Implements `KVCachePool`, except `layer` and `store`, which only tensors need.

    A page of a group is one region: its layers one after another, each with its keys and then its
    values in kernel order. That order depends on the dtype only, never on the CPU.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        *,
        small: SmallNumbers | None = None,
        latent: int | None = None,
        index: int = 0,
        rows: bool = False,
    ) -> None:
        """Reserve the memory; it becomes resident when first written.

        Args:
            shape: Shape of the pages.
            dtype: Type of the model's rows.
            small: Storage type of keys and values, if not `dtype`.
            latent: For latent attention: number of key columns that are also the values.
            index: For sparse attention: number of last key columns, which the indexer scores.
            rows: For compressed attention: whether pages hold a row for each token.

        Raises:
            Unsupported: no kernel for this page size or dtype.
        """
        if shape.page_size % PAGE_MULTIPLE:
            raise Unsupported(f"pages of {shape.page_size} tokens: not a multiple of 16")
        if small and latent:
            raise Unsupported(f"latent keys of {small}")
        if small == "int4" and shape.head_dim not in ROTATED_HEADS:
            sizes = ", ".join(map(str, sorted(ROTATED_HEADS)))
            raise Unsupported(f"int4 heads of {shape.head_dim} columns: {sizes} can be rotated")
        if dtype not in (torch.bfloat16, torch.float32):
            raise Unsupported(f"keys and values of {dtype}")
        page = PageShape(
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim - index,
            value_dim=index or latent or shape.head_dim,
            shared=latent is not None and not index,
            tokens=index > 0 or rows,
            page_size=shape.page_size,
            dtype=dtype,
            small=small,
        )
        transfers = HostTransfers()
        self.page_size, self.layer_groups = shape.page_size, shape.layer_groups
        self.groups: Sequence[PagedBuffer] = []
        self._layers: dict[int, LayerPages] = {}
        for number, group in enumerate(shape.kv_groups):
            mine = replace(page, head_dim=group.head_dim) if group.head_dim else page
            pages = allocate_pages(mine, group.num_pages, len(group.layers), number, shape.memory)
            self._layers.update(zip(group.layers, pages.layers, strict=True))
            memory = torch.from_numpy(pages.memory)[None]
            # tokens of a page are interleaved, so a copy moves the whole page
            self.groups.append(
                PagedBuffer(memory, shape.page_size, whole_pages=True, transfers=transfers)
            )

    @property
    def layers(self) -> Mapping[int, LayerPages]:
        """Pages of each attention layer, by its index."""
        return self._layers

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Not supported: the pages are in kernel order."""
        raise NotImplementedError("the pages of a step program cannot be read as tensors")

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Not supported: programs store KV themselves."""
        raise NotImplementedError("the pages of a step program cannot be written as tensors")

    def move(self, group: int, sources_N: IntArray, targets_N: IntArray) -> None:
        """Not supported: step programs verify no draft trees."""
        raise NotImplementedError("step programs verify no draft trees")
