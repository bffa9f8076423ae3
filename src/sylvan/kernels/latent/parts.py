"""Constants of a layer of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.kernels.api import HeadNorm, LinearWeight, Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Columns: `nope` and `turning` of a query head, `value` of an output head, `latent`."""

    num_heads: int
    nope: int
    turning: int
    value: int
    latent: int


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Constants of one layer: `up` (N (nope + value), latent) makes keys and values of latents."""

    shape: LatentShape
    up: LinearWeight
    norm: HeadNorm  # of the latent columns
    rope: Rope  # of the turning columns
