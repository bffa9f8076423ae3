"""Attention by Pallas kernels, as part of step programs on JAX: for TPUs.

The implementation is the lowering `sylvan.kernels.xla.pallas`; this module imports no JAX.
"""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.attention.api import AttentionCaps
from sylvan.runtime.attention.jnp import JnpAttention


class PallasAttention(JnpAttention):
    """Declares what the Pallas kernels support. On CPUs they are interpreted, very slowly."""

    caps: ClassVar[AttentionCaps] = JnpAttention.caps


BACKEND = PallasAttention
