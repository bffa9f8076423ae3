"""Builds a cache manager from settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sylvan.runtime.cache.by_rank import CachesByRank
from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.groups import KVGroup, check_groups
from sylvan.runtime.cache.heap import StagedHeap
from sylvan.runtime.cache.loads import Loads
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.pages import PageAllocator
from sylvan.runtime.cache.prefix import NoPrefixCache
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.residency import Residency, Tier, TierPolicy
from sylvan.runtime.cache.states import NodeStates, StateSlots
from sylvan.runtime.cache.windows import WindowPages

PrefixKind = Literal["radix", "none"]

COUNTED_PER_WINDOW_PAGE = 16
"""Tree pages per page of the first window group, for models without a full group. Such pages
store only token ids, but need a bound.
"""


def kv_cache(
    groups: Sequence[KVGroup],
    prefix: PrefixKind,
    eviction: str,
    tiers: Sequence[Tier] = (),
    tier_policy: TierPolicy | None = None,
) -> KVCacheManager:
    """Build the manager for the KV groups of a model.

    Args:
        groups: The full or latent group comes first, if there is one. A request's page tables are
          in the order of the paged groups.
        prefix: Whether prefixes are cached.
        eviction: Name of the eviction policy.
        tiers: Tiers below the device, nearest first.
        tier_policy: Needed with tiers.

    Raises:
        ConfigError: no such eviction policy.
        ValueError: the groups are inconsistent, or do not support the tiers.
    """
    check_groups(groups)
    policy = eviction_policy(eviction)
    paged = [group for group in groups if group.kind != "state"]
    num_states = sum(group.num_pages for group in groups if group.kind == "state")
    has_full = paged[0].kind != "window"
    windowed = paged[1:] if has_full else paged
    windows = [WindowPages(group, index) for index, group in enumerate(windowed)]
    counted = paged[0].num_pages if has_full else paged[0].num_pages * COUNTED_PER_WINDOW_PAGE
    pages = PageAllocator(counted, paged[0].page_size, paged[0].first)
    if prefix == "none":
        slots = StateSlots(num_states, None) if num_states else None
        return KVCacheManager(pages, NoPrefixCache(), slots, windows, has_full=has_full)
    if tiers and (tier_policy is None or not has_full):
        raise ValueError("lower tiers need a policy, and a full or latent KV group")
    tree = RadixCache(
        pages.page_size,
        policy,
        windows=windows,
        states=NodeStates() if num_states else None,
        min_load_tokens=tier_policy.min_load_tokens if tiers and tier_policy else 0,
    )
    slots = StateSlots(num_states, tree) if num_states else None
    loads = None
    if tier_policy is not None and isinstance(tree.heap, StagedHeap):
        ahead = tier_policy.write_ahead_pages
        residency = Residency(tree.nodes, tree.heap, policy, tiers, ahead)
        loads = Loads(tree.nodes, residency, pages, windows, slots)
    return KVCacheManager(pages, tree, slots, windows, loads, has_full=has_full)


def caches_by_rank(
    groups: Sequence[KVGroup], count: int, prefix: PrefixKind, eviction: str
) -> CachesByRank:
    """Build a manager for each of several groups of ranks that have different requests.

    Args:
        groups: Memory of one of them; see `kv_cache`.
        count: Number of groups of ranks.
        prefix: Whether prefixes are cached.
        eviction: Name of the eviction policy.

    Raises:
        ConfigError: no such eviction policy.
        ValueError: the KV groups are inconsistent, or hold states.
    """
    if any(group.kind == "state" for group in groups):
        raise ValueError("groups of ranks with different requests keep no recurrent states")
    parts = [
        [replace(group, first=number * (group.num_pages - 1)) for group in groups]
        for number in range(count)
    ]
    return CachesByRank([kv_cache(part, prefix, eviction) for part in parts])
