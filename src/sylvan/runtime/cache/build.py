"""Makes a cache manager from plain settings."""

from __future__ import annotations

from typing import Literal

from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.prefix import NoPrefixCache
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.states import StateRadix, StateSlots


def kv_cache(
    num_pages: int,
    page_size: int,
    prefix: Literal["radix", "none"],
    eviction: str,
    num_states: int = 0,
) -> KVCacheManager:
    """A manager over `num_pages` pages, the padding page 0 included.

    `num_states` slots of recurrent state, the empty one included; 0 for models that have none.

    Raises:
        ConfigError: there is no eviction policy of that name.
    """
    pages = PageAllocator(num_pages, page_size)
    if num_states:
        kept = StateRadix(page_size, eviction_policy(eviction)) if prefix == "radix" else None
        return KVCacheManager(pages, kept or NoPrefixCache(), StateSlots(num_states, kept))
    tree = RadixCache(page_size, eviction_policy(eviction)) if prefix == "radix" else None
    return KVCacheManager(pages, tree or NoPrefixCache())
