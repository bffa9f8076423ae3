"""The interface of attention backends, gathered where a backend's author looks for it.

The definitions live in lower packages, because a batch names its backend and a layer its spec.
"""

from __future__ import annotations

from sylvan.kernels.api import AttentionLayer
from sylvan.runtime.core.forward import AttentionBackend, AttentionCaps, ForwardBatch

__all__ = ["AttentionBackend", "AttentionCaps", "AttentionLayer", "ForwardBatch"]
