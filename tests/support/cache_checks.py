"""Invariants of a cache manager: each page of each group, and each slot, has one owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sylvan.runtime.cache.by_rank import CachesByRank, KVMemory
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.matching import path_to
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import KVHandle, Load, Node, Place, below


def check_cache(cache: KVMemory, handles: Sequence[KVHandle]) -> None:
    """Check that each page and state slot has one owner, and that locks, readers and counts match
    `handles`.
    """
    if isinstance(cache, CachesByRank):
        for rank, part in enumerate(cache.parts):
            check_cache(part, [kv for kv in handles if kv.rank == rank])
        assert sum(cache._held) == len(handles)
        return
    tree = cache.tree
    nodes = [*below(tree.roots().values())] if isinstance(tree, RadixCache) else []
    loads = cache.loads.running if cache.loads is not None else ()
    _check_pages(cache, handles, nodes, loads)
    for group in range(len(cache._windows)):
        _check_window(cache, group, handles, nodes, loads)
    if isinstance(tree, RadixCache):
        _check_tree(tree, nodes, [owner.node for owner in (*handles, *loads)], loads)
    if cache.states is not None:
        held = [kv.state.slot for kv in handles if kv.state is not None]
        held += [load.state.target for load in loads if load.state and load.kv is None]
        kept = [node.parts.state for node in nodes if node.parts and node.parts.state]
        if isinstance(tree, RadixCache):
            assert sorted(kept) == sorted(tree.states.holders)
        assert len({*held, *kept}) == len(held) + len(kept), "a state slot has two owners"
        assert cache.states.free_slots + len(held) + len(kept) == cache.states.num_slots


def _check_pages(
    cache: KVCacheManager, handles: Sequence[KVHandle], nodes: Sequence[Node], loads: Sequence[Load]
) -> None:
    owners = cache._allocator.free_mask().astype(np.int64)
    for kv in handles:
        owners[kv.pages[kv.shared : kv.num_pages]] += 1
        if kv.loading is None:
            assert kv.shared == -(-kv.node.stop // cache.page_size)
    for node in nodes:
        owners[node.pages] += 1
    for part in (p for load in loads for p in load.pages if p.group == 0):
        owners[part.targets] += 1
    assert (owners == 1).all(), "a page is lost or has two owners"


def _check_window(
    cache: KVCacheManager,
    group: int,
    handles: Sequence[KVHandle],
    nodes: Sequence[Node],
    loads: Sequence[Load],
) -> None:
    window = cache._windows[group]
    owners = window.allocator.free_mask().astype(np.int64)
    readers = Counter[int]()
    for kv in handles:
        table = kv.windows[group]
        middle = min(max(kv.shared, table.first), kv.num_pages)
        own = table.pages[max(middle, table.first) : kv.num_pages]
        assert 0 not in own
        owners[own] += 1
        borrowed = table.pages[table.first : middle]
        assert kv.loading is not None or 0 not in borrowed
        readers.update(borrowed[borrowed != 0].tolist())
        assert not table.pages[: table.first].any()
    cached: list[int] = []
    for node in nodes:
        pages = node.parts.windows[group]
        assert len(pages) == -(-len(node.tokens) // cache.page_size)
        held = pages[pages != 0]
        owners[held] += 1
        cached += held.tolist()
        for page in held.tolist():
            assert window._owner[page] is node
    for part in (p for load in loads for p in load.pages if p.group == group + 1):
        owners[part.targets] += 1
    assert (owners == 1).all(), "a window page is lost or has two owners"
    assert window.num_cached == len(cached)
    assert readers.keys() <= set(cached), "a request reads a page that its node has lost"
    assert {p: n for p, n in enumerate(window._readers) if n} == dict(readers)
    assert set(window._idle) == set(cached) - readers.keys()


def _check_tree(
    tree: RadixCache, nodes: Sequence[Node], ends: Sequence[Node], loads: Sequence[Load]
) -> None:
    size, tiered = tree.page_size, tree.nodes.tiered
    locks, readers = Counter[Node](), Counter[Node]()
    for end in ends:
        locks.update(path_to(end))
    for load in loads:
        readers.update(path_to(load.node))
    assert set(locks) <= set(nodes), "a request uses a node that is not in the tree"
    for node in nodes:
        assert node.locks == locks[node]
        assert node.parent is not None
        assert node.start == node.parent.stop
        assert node.places, "a node lies nowhere"
        on_device = Place.DEVICE in node.places
        assert len(node.pages) == (-(-len(node.tokens) // size) if on_device else 0)
        assert not node.children or len(node.tokens) % size == 0
        assert node.order == (sorted(node.children) if size > 1 else [])
        if not tiered:
            assert on_device
            continue
        assert node.parts.readers == readers[node]
        assert node.parts.on_device == sum(len(c.pages) > 0 for c in node.children.values())
        above = node.parent
        assert above.parent is None or len(above.pages) or not on_device, "a gap on the device"
        lengths = {len(at.pages) for at in node.parts.lower.values()}
        assert lengths <= {-(-len(node.tokens) // size)}
    assert tree.num_nodes == len(nodes)
    assert tree.total_pages == sum(len(node.pages) for node in nodes)
    assert tree.evictable_pages == sum(len(node.pages) for node in nodes if not node.locks)
