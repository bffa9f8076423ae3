"""Sizes and parameters of residual streams; see `sylvan.kernels.streams`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import LinearWeight


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShape:
    """Number of streams, rounds of normalising a matrix, and epsilons: of that, and of norms."""

    streams: int
    rounds: int
    eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class StreamParts:
    """Parameters of a layer, float32: `fn` (W, S D), `base` (W,) and `scale`.

    W is S to sum streams; otherwise S (2 + S): weights of reading, of writing, and of mixing.
    `scale` has a number for each of these.
    """

    fn: LinearWeight
    base: torch.Tensor
    scale: torch.Tensor
    shape: StreamShape
