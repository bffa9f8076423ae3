"""The interface of KV pools; defined in `core.forward`, because a batch names its pool."""

from __future__ import annotations

from sylvan.runtime.core.forward import KVCachePool

__all__ = ["KVCachePool"]
