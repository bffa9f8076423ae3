"""Inputs and outputs of paged attention on a device; no Triton here.

Shapes: T rows, R requests, S rows of the page table, K key/value heads, H head dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import HeadNorm, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Keys and values of a layer, and the KV slots of each request.

    `keys` (pages, page_size, K, H) and `values` (pages, page_size, K, V): bf16, fp16, fp32 or
    float8_e4m3fn, the last dimension contiguous. Values that are the first columns of the keys
    themselves (latent attention) are read once. Stored fp8 numbers are values divided by the scale.
    `lens_R`: tokens with KV, including those of this step; 0 in a padding row.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table_SP: torch.Tensor
    rows_R: torch.Tensor
    lens_R: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for side in (self.keys, self.values):
            assert side.stride(-1) == 1
            assert side.stride(0) == side.shape[1] * side.stride(1)

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

    `keys` and `values` as in `LayerKV`; fp8 numbers are values divided by the scale,
    and saturate.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots_T: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
