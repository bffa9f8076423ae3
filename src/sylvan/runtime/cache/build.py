"""Makes a cache manager from plain settings."""

from __future__ import annotations

from typing import Literal

from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.prefix import NoPrefixCache
from sylvan.runtime.cache.radix import RadixCache


def kv_cache(
    num_pages: int, page_size: int, prefix: Literal["radix", "none"], eviction: str
) -> KVCacheManager:
    """A manager over `num_pages` pages, the padding page 0 included.

    Raises:
        ConfigError: there is no eviction policy of that name.
    """
    tree = RadixCache(page_size, eviction_policy(eviction)) if prefix == "radix" else None
    return KVCacheManager(PageAllocator(num_pages, page_size), tree or NoPrefixCache())
