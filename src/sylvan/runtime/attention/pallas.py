"""Attention by Pallas kernels, as part of step programs on JAX: for TPUs.

Nothing here imports JAX: the program has its own lowering (`sylvan.kernels.xla.pallas`).
"""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.attention.api import AttentionCaps
from sylvan.runtime.attention.jnp import JnpAttention


class PallasAttention(JnpAttention):
    """The same placeholder. On CPUs the kernels are interpreted, very slowly."""

    caps: ClassVar[AttentionCaps] = JnpAttention.caps


BACKEND = PallasAttention
