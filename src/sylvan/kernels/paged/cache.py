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
    dtype: torch.dtype  # of the model's rows: bfloat16 or float32
    shared: bool = False  # values are the first columns of the keys, and have no pages
    int8: bool = False  # pages hold int8 levels, and a float32 scale for each token and head

    def __post_init__(self) -> None:
        assert self.page_size % PAGE_MULTIPLE == 0

    @property
    def key_bytes(self) -> int:
        """Bytes of a page's keys in one layer."""
        return self._bytes(-(-self.head_dim // _KEY_PAD) * _KEY_PAD)

    @property
    def value_bytes(self) -> int:
        """Bytes of a page's values in one layer."""
        return 0 if self.shared else self._bytes(-(-self.value_dim // _VALUE_PAD) * _VALUE_PAD)

    def _bytes(self, width: int) -> int:
        of_token = width + 4 if self.int8 else width * self.dtype.itemsize
        return self.num_kv_heads * self.page_size * of_token


class LayerPages:
    """All pages of one layer. `keys` and `values`: (num_pages, bytes of a page)."""

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        self.shape = shape
        self.keys: Bytes = _pages(num_pages, shape.key_bytes)
        self.values: Bytes = _pages(num_pages, shape.value_bytes)


def _pages(count: int, size: int) -> Bytes:
    return allocate(count * size).reshape(count, size)
