"""Keys and values of ordinary attention.

Shapes: L layers of a KV group, P pages of it, T tokens, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sylvan.kernels.memory import Bytes
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.cache import ROTATED_HEADS
from sylvan.kernels.paged.pages import NIBBLES, SCALED, token_scales
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.transfers import Transfers


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A KV group: indices of the attention layers that share page numbers, and number of pages.

    `head_dim`: columns of a head, if they differ from those of other groups (latents only).
    """

    layers: tuple[int, ...]
    num_pages: int
    head_dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """The layout of a pool: storage per token, page size and number of pages.

    `groups` divide the layers; empty: all layers form one group of `num_pages` pages. `memory`:
    existing pages of the only group, contents included, (pages, bytes of a page); None: new memory.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    groups: tuple[GroupShape, ...] = ()
    memory: Bytes | None = field(default=None, compare=False)

    @property
    def kv_groups(self) -> tuple[GroupShape, ...]:
        """The groups, at least one."""
        return self.groups or (GroupShape(tuple(range(self.num_layers)), self.num_pages),)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The group of each layer."""
        found = {layer: g for g, group in enumerate(self.kv_groups) for layer in group.layers}
        return tuple(found[layer] for layer in range(self.num_layers))

    def bytes_per_page(self, dtype: torch.dtype) -> int:
        """Bytes of one page in all layers of `MHAPool`."""
        numbers = 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim
        return bytes_of(numbers, dtype, self.head_dim if dtype in SCALED else 0)


def bytes_of(numbers: int, dtype: torch.dtype, scaled: int) -> int:
    """Bytes of `numbers` elements, with a float32 scale per `scaled` of them; 0: no scales."""
    scales = numbers // scaled if scaled else 0
    size = numbers // 2 if dtype == NIBBLES else numbers * dtype.itemsize
    return size + 4 * scales


class MHAPool:
    """One tensor (L, 2, P, page_size, K, H) for each group: keys, then values of each layer.

    Layers come first, because attention kernels of devices address a token by its slot times one
    stride. So a page has 2 L regions; an exported page has one layer after another, each with its
    keys, then its values, token by token.

    With int8 and int4, a token has its heads, then their scales: see `kernels.paged.pages`.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        transfers: Transfers | None = None,
    ) -> None:
        """Allocate zeroed pages: masked keys are still multiplied, and 0 * NaN is not 0.

        Raises:
            ConfigError: int4 does not support this head dimension.
        """
        if dtype == NIBBLES and shape.head_dim not in ROTATED_HEADS:
            sizes = ", ".join(map(str, sorted(ROTATED_HEADS)))
            raise ConfigError(
                f"cache.dtype=int4 needs heads of {sizes} columns, and this model has "
                f"{shape.head_dim}; choose int8"
            )
        self.page_size, self.layer_groups = shape.page_size, shape.layer_groups
        self.groups: Sequence[PagedBuffer] = []
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tokens: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, with scales
        heads, width = shape.num_kv_heads, shape.head_dim // (2 if dtype == NIBBLES else 1)
        row = heads * (width + (4 if dtype in SCALED else 0))
        for group in shape.kv_groups:
            size = (len(group.layers), 2, group.num_pages, shape.page_size, row)
            whole = torch.zeros(size, dtype=dtype, device=device)
            numbers = whole[..., : heads * width].unflatten(-1, (heads, width))
            for layer, sides, tokens in zip(group.layers, numbers, whole, strict=True):
                self._layers[layer] = sides[0], sides[1]
                self._tokens[layer] = tokens[0], tokens[1]
            memory = whole.flatten(0, 1).flatten(2).view(torch.uint8)
            self.groups.append(PagedBuffer(memory, shape.page_size, transfers=transfers))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[index]

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        slots = slots_T.long()
        for side, x_TKH in zip(self._layers[index], (k_TKH, v_TKH), strict=True):
            if side.dtype in SCALED:
                codes = reference.int4_codes if side.dtype == NIBBLES else reference.int8_codes
                side.flatten(0, 1)[slots], scales = codes(x_TKH)
                token_scales(side).flatten(0, 1)[slots] = scales
            else:
                side.flatten(0, 1)[slots] = fitted(x_TKH, side.dtype)

    def move(self, group: int, sources_N: IntArray, targets_N: IntArray) -> None:
        for layer, sides in self._tokens.items():
            if self.layer_groups[layer] == group:
                move_rows(sides, sources_N, targets_N)


def move_rows(tensors: Sequence[torch.Tensor], sources_N: IntArray, targets_N: IntArray) -> None:
    """Copy entries of tensors (P, page_size, ...) between slots; all are read before any write."""
    sources, targets = (torch.from_numpy(x.astype(np.int64)) for x in (sources_N, targets_N))
    for tensor in tensors:
        rows = tensor.flatten(0, 1)
        rows[targets.to(rows.device)] = rows[sources.to(rows.device)]


def fitted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to the dtype of a pool; 8-bit floats saturate."""
    if dtype.itemsize > 1:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)
