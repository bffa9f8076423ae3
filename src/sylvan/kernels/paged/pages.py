"""Inputs and outputs of paged attention on a device; no Triton here.

Shapes: T rows, R requests, S rows of the page table, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sylvan.kernels.api import HeadNorm, KVScales, Rope

NIBBLES = torch.uint8
"""Type of int4 keys and values: two numbers a byte, columns d and d + half; heads are rotated."""
SCALED = (torch.int8, NIBBLES)
"""Types with a float32 scale for each token and head, behind the heads of a token."""

ScaleKind = Literal["none", "head", "token"]
"""Granularity of scales: none, per key head, or per head of a token."""


def token_scales(side: torch.Tensor) -> torch.Tensor:
    """A view of a side's scales. Shape: (P, page_size, K, W) -> (P, page_size, K)."""
    heads, width = side.shape[2:]
    size = (*side.shape[:2], 4 * heads)
    strides = (*side.stride()[:2], 1)
    rows = side.as_strided(size, strides, side.storage_offset() + heads * width)
    return rows.view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Keys and values of a layer, and the KV slots of each request.

    `keys` (pages, page_size, K, H) and `values` (pages, page_size, K, V): bf16, fp16, fp32, an
    8-bit float, int8 or `NIBBLES`, the last dimension contiguous. Values that are the first columns
    of the keys themselves (latent attention) are read once. `scales`: of 8-bit floats; a stored
    number is a value divided by its head's. `lens_R`: tokens with KV, those of this step included;
    0 in a padding row.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table_SP: torch.Tensor
    rows_R: torch.Tensor
    lens_R: torch.Tensor
    scales: KVScales | None = None

    def __post_init__(self) -> None:
        for side in (self.keys, self.values):
            assert side.stride(-1) == 1
            assert side.stride(0) == side.shape[1] * side.stride(1)

    @property
    def pairs(self) -> int:
        """Numbers of a byte's worth of columns: 2 of `NIBBLES`, else 1."""
        return 2 if self.keys.dtype == NIBBLES else 1

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of a key and of a value."""
        return self.keys.shape[-1] * self.pairs, self.values.shape[-1] * self.pairs

    @property
    def scaled(self) -> ScaleKind:
        """Granularity of the scales."""
        if self.keys.dtype in SCALED:
            return "token"
        return "none" if self.scales is None else "head"

    @property
    def shared(self) -> bool:
        """Whether values are columns of the keys."""
        keys, values = self.keys, self.values
        # On the meta device all addresses are zero, but a view has its base's strides.
        wider = values.stride(2) > values.shape[3]
        return keys.data_ptr() == values.data_ptr() and wider


@dataclass(frozen=True, slots=True)
class Rotary:
    """Norms and rotation of heads before attention; each part may be absent."""

    rope: Rope | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Where keys and values of a step's tokens go: slot = page * page_size + offset.

    `keys` and `values` as in `LayerKV`; 8-bit floats are values divided by the scale, and saturate.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots_T: torch.Tensor
    scales: KVScales | None = None
