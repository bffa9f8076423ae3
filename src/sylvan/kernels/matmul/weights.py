"""Quantised weights as PyTorch sees them; kernels pack them in their own order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sylvan.kernels.api import LinearWeight

GROUP_SIZES = (32, 64, 128)
_BLOCK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """Symmetric int8, one scale per output channel: w = q * scale[:, None]."""

    # Of a stack of E matrices each tensor has E in front.
    q: torch.Tensor  # (N, K) int8; own rounding stays in [-127, 127], others use -128 as well
    scale: torch.Tensor  # (N,) float32

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.q.shape

    def __getitem__(self, index: int) -> Int8Weight:
        """One matrix of a stack."""
        return Int8Weight(self.q[index], self.scale[index])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantised rows, float32."""
        index = index.long()
        return self.q[index].float() * self.scale[index, None]


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """Symmetric int4 around 8, one scale per `group` inputs: w = (q - 8) * scale."""

    q: torch.Tensor  # (N, K / 2) uint8; input 2i in the low nibble, 2i + 1 in the high one
    scale: torch.Tensor  # (N, K / group) float32
    group: int

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return torch.Size((*self.q.shape[:-1], self.q.shape[-1] * 2))

    def __getitem__(self, index: int) -> Int4Weight:
        """One matrix of a stack."""
        return Int4Weight(self.q[index], self.scale[index], self.group)

    def levels(self) -> torch.Tensor:
        """Levels q - 8 as int8, (N, K)."""
        pairs = torch.stack((self.q & 15, self.q >> 4), -1).flatten(-2)
        return pairs.to(torch.int8) - 8

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantised rows, float32."""
        index = index.long()
        part = Int4Weight(self.q[index], self.scale[index], self.group)
        return part.levels().float() * part.scale.repeat_interleave(self.group, -1)


@dataclass(frozen=True, slots=True, eq=False)
class DeferredWeight:
    """A weight not read yet: `load` gives it when it is packed, so that one is in memory at a time.

    `key` is equal for tied weights, which are packed once. `origin` is what it is made of, and how,
    where that is another weight.
    """

    shape: torch.Size
    load: Callable[[], torch.Tensor | Int8Weight | Int4Weight]
    key: str
    origin: tuple[LinearWeight, Callable[[torch.Tensor], torch.Tensor]] | None = None


def quantise_int8(weight: torch.Tensor) -> Int8Weight:
    """Round a float matrix (N, K) to int8 with the largest magnitude of each row at 127.

    A stack of matrices (E, N, K) becomes one of quantised matrices.
    """
    if weight.dim() == 3:
        flat = quantise_int8(weight.flatten(0, 1))
        return Int8Weight(*(part.unflatten(0, weight.shape[:2]) for part in (flat.q, flat.scale)))
    q = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0], dtype=torch.float32)
    for rows in _blocks(len(q)):
        w = weight[rows].float()
        scale[rows] = (w.abs().amax(1) / 127).clamp_min(1e-30)
        q[rows] = (w / scale[rows, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8Weight(q, scale)


def quantise_int4(weight: torch.Tensor, group: int = 64) -> Int4Weight:
    """Round a float matrix (N, K) to 4 bits; K must be a multiple of `group`.

    The value of largest magnitude of a group becomes level -8, so that the lone extra negative
    level is not lost (the rule of GGUF's Q4_0). Stacks as `quantise_int8`.
    """
    if weight.dim() == 3:
        flat = quantise_int4(weight.flatten(0, 1), group)
        q, scale = (part.unflatten(0, weight.shape[:2]) for part in (flat.q, flat.scale))
        return Int4Weight(q, scale, group)
    count, cols = weight.shape
    assert cols % group == 0, f"{cols} inputs do not divide into groups of {group}"
    q = torch.empty((count, cols // 2), dtype=torch.uint8)
    scale = torch.empty((count, cols // group), dtype=torch.float32)
    for rows in _blocks(count):
        w = weight[rows].float().unflatten(1, (-1, group))
        extreme = w.gather(2, w.abs().argmax(2, keepdim=True))
        inverse = torch.where(extreme == 0, 0.0, -8 / extreme)
        levels = ((w * inverse).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
        q[rows] = levels[:, ::2] | levels[:, 1::2] << 4
        scale[rows] = extreme.squeeze(2) / -8
    return Int4Weight(q, scale, group)


def _blocks(count: int) -> list[slice]:
    """So many rows at a time that float32 copies of them stay small."""
    return [slice(first, first + _BLOCK) for first in range(0, count, _BLOCK)]
