"""The pool of models without KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sylvan.kernels.paged.cache import LayerPages
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.pool.pages import PagedBuffer


class NoPool:
    """Pages without contents: the scheduler counts them, but nothing is stored."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.layer_groups: Sequence[int] = ()
        empty = torch.empty(0, num_pages, 0, dtype=torch.uint8)
        self.groups: Sequence[PagedBuffer] = [PagedBuffer(empty, page_size)]

    @property
    def layers(self) -> Mapping[int, LayerPages]:
        """Return no pages."""
        return {}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Not supported: there are no keys and values."""
        raise NotImplementedError("this model keeps no keys and values")

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Not supported: there are no keys and values."""
        raise NotImplementedError("this model keeps no keys and values")

    def move(self, group: int, sources_N: IntArray, targets_N: IntArray) -> None:
        pass
