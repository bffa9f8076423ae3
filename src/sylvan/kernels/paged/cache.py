"""Pages of keys and values in the order the attention kernels read them (see `pages.h`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.memory import Bytes, allocate

_KEY_PAD, _VALUE_PAD = 32, 16
PAGE_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PageShape:
    """What one layer stores for a page."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int  # tokens, a multiple of 16
    dtype: torch.dtype  # bfloat16 or float32

    def __post_init__(self) -> None:
        assert self.page_size % PAGE_MULTIPLE == 0

    @property
    def key_bytes(self) -> int:
        """Bytes of a page's keys in one layer."""
        width = -(-self.head_dim // _KEY_PAD) * _KEY_PAD
        return self.num_kv_heads * self.page_size * width * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        """Bytes of a page's values in one layer."""
        width = -(-self.value_dim // _VALUE_PAD) * _VALUE_PAD
        return self.num_kv_heads * self.page_size * width * self.dtype.itemsize


class LayerPages:
    """All pages of one layer. `keys` and `values`: (num_pages, bytes of a page)."""

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        self.shape = shape
        self.keys: Bytes = allocate(num_pages * shape.key_bytes).reshape(num_pages, -1)
        self.values: Bytes = allocate(num_pages * shape.value_bytes).reshape(num_pages, -1)
