"""Quantised weights as PyTorch sees them; kernels pack them in their own order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """Symmetric int8, one scale per output channel: w = q * scale[:, None]."""

    q: torch.Tensor  # (N, K) int8, in [-127, 127]
    scale: torch.Tensor  # (N,) float32

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.q.shape

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
        return torch.Size((self.q.shape[0], self.q.shape[1] * 2))

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

    `key` is equal for tied weights, which are packed once.
    """

    shape: torch.Size
    load: Callable[[], torch.Tensor | Int8Weight | Int4Weight]
    key: str


def quantise_int8(weight: torch.Tensor) -> Int8Weight:
    """Round a float matrix (N, K) to int8 with the largest magnitude of each row at 127."""
    w = weight.float()
    scale = (w.abs().amax(1) / 127).clamp_min(1e-30)
    return Int8Weight((w / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale)


def quantise_int4(weight: torch.Tensor, group: int = 64) -> Int4Weight:
    """Round a float matrix (N, K) to 4 bits; K must be a multiple of `group`.

    The value of largest magnitude of a group becomes level -8, so that the lone extra negative
    level is not lost (the rule of GGUF's Q4_0).
    """
    rows, cols = weight.shape
    assert cols % group == 0, f"{cols} inputs do not divide into groups of {group}"
    w = weight.float().reshape(rows, cols // group, group)
    extreme = w.gather(2, w.abs().argmax(2, keepdim=True))
    scale = extreme / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    q = ((w * inverse).round() + 8).clamp(0, 15).to(torch.uint8).reshape(rows, cols)
    return Int4Weight(q[:, ::2] | q[:, 1::2] << 4, scale.squeeze(2).contiguous(), group)
