"""Pages of keys and values in the order the attention kernels read them (see `pages.h`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sylvan.kernels.memory import Bytes, allocate

_KEY_PAD, _VALUE_PAD = 32, 16
PAGE_MULTIPLE = 16
ROTATED_HEADS = frozenset({32, 64, 128, 256})
"""Head sizes that can be stored in four bits."""

SmallNumbers = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2"]
"""Types of pages with a float32 scale per token and head; int4 heads are rotated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageShape:
    """Layout of one layer's part of a page.

    With `tokens` a page holds a row for each token, and the values are an indexer's keys in kernel
    order (see `opset.sparse.TokenPages`).
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int  # tokens, a multiple of 16
    dtype: torch.dtype  # of the model's rows: bfloat16 or float32
    shared: bool = False  # values are the first columns of the keys, and have no pages
    small: SmallNumbers | None = None  # instead of the dtype
    tokens: bool = False

    def __post_init__(self) -> None:
        assert self.page_size % PAGE_MULTIPLE == 0
        assert self.small != "int4" or {self.head_dim, self.value_dim} <= ROTATED_HEADS

    @property
    def key_bytes(self) -> int:
        """Bytes of a page's keys in one layer."""
        return self._bytes(-(-self.head_dim // _KEY_PAD) * _KEY_PAD)

    @property
    def value_bytes(self) -> int:
        """Bytes of a page's values in one layer."""
        return 0 if self.shared else self._bytes(-(-self.value_dim // _VALUE_PAD) * _VALUE_PAD)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in pages."""
        return 1 if self.small else self.dtype.itemsize

    def _bytes(self, width: int) -> int:
        of_token = width * self.dtype.itemsize
        if self.small:
            of_token = width // (2 if self.small == "int4" else 1) + 4
        return self.num_kv_heads * self.page_size * of_token


@dataclass(frozen=True, slots=True)
class LayerPages:
    """All pages of one layer, parts of the pages of a KV group.

    `keys` and `values`: (num_pages, bytes of a page in this layer); the bytes of a page are
    contiguous, the pages may be anywhere. `group`: the KV group whose page table assigns pages.
    """

    shape: PageShape
    keys: Bytes
    values: Bytes
    group: int = 0

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers from one page's keys to the next one's, and from its values."""
        size = self.shape.itemsize
        return self.keys.strides[0] // size, self.values.strides[0] // size


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Pages of all layers of a KV group: `memory` (num_pages, bytes of a page).

    A page is contiguous: for each layer, keys then values. Attention reads a layer's part as fast
    as from an array per layer, a page is copied in one piece, and the first page of a request
    touches one memory region instead of two per layer.
    """

    memory: Bytes
    layers: tuple[LayerPages, ...]


def allocate_pages(
    shape: PageShape,
    num_pages: int,
    num_layers: int = 1,
    group: int = 0,
    memory: Bytes | None = None,
) -> GroupPages:
    """Allocate zeroed pages, which become resident when first written.

    Args:
        shape: Layout of a layer's part of a page.
        num_pages: Number of pages.
        num_layers: Number of layers of the KV group.
        group: Number of the KV group.
        memory: Existing pages to use, contents included: (pages, bytes of a page); None: new.

    Raises:
        MemoryError: The system has too little memory.
    """
    each = shape.key_bytes + shape.value_bytes
    size = num_pages, num_layers * each
    if memory is None:
        memory = allocate(num_pages * num_layers * each).reshape(size)
    assert memory.shape == size
    layers: list[LayerPages] = []
    for start in range(0, num_layers * each, each):
        values = start + shape.key_bytes
        sides = memory[:, start:values], memory[:, values : start + each]
        layers.append(LayerPages(shape, *sides, group))
    return GroupPages(memory, tuple(layers))
