"""Finds how much of a cached prefix is usable when nodes hold more than pages of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.matching import (
    MatchedPages,
    Tail,
    Walk,
    contained_leaves,
    nearest_tail,
    walk,
    whole_path,
)
from sylvan.runtime.cache.prefix import Match
from sylvan.runtime.cache.states import NodeStates, has_state
from sylvan.runtime.cache.tree import NodeTree
from sylvan.runtime.cache.types import CacheKey, Node


@dataclass(slots=True, eq=False)
class Extent:
    """Usable part of a walk: `length` tokens in whole pages, and then `tail`."""

    length: int
    tail: Tail | None = None
    loads: bool = False


class Extents:
    """Finds the longest prefix from which every component of the nodes can continue."""

    def __init__(self, nodes: NodeTree, states: NodeStates | None, min_load_tokens: int) -> None:
        self._nodes, self._states = nodes, states
        self._components = nodes.components
        self._min_load_tokens = min_load_tokens

    def peek(self, key: CacheKey, limit: int, load: int) -> int:
        size = self._nodes.page_size
        found = walk(self._nodes.roots.get(key.namespace), key, limit, size)
        if found.end is not None:
            found.tail = self._tail(found.end, key.tokens[:limit], key, found.length)
        extent = self._extent(found, load=load)
        return extent.length + (extent.tail.tokens if extent.tail else 0)

    def walk_to(self, node: Node, tokens: IntArray, key: CacheKey, length: int) -> Walk:
        """A walk of `length` tokens that ends at `node`."""
        tail = self._tail(node, tokens, key, length)
        return Walk(whole_path(node, self._nodes.page_size), length, tail, node)

    def match(self, found: Walk, *, step: int, load: int) -> Match:
        """The part of a walk that a request may use; see `RadixCache.match`."""
        assert found.end is not None
        if found.tail is not None and found.tail.node.computed_at >= step:
            found.tail = None
        extent = self._extent(found, load=load)
        node = self._nodes.node_at(found.end, extent.length)
        match = Match(node, extent.length, cached_tokens=found.length, loads=extent.loads)
        if extent.tail is not None:
            match.tail, match.tail_tokens = extent.tail.node, extent.tail.tokens
        last = match.tail or node
        match.state = last.parts.state if last.parts else 0
        return match

    def _extent(self, found: Walk, *, load: int) -> Extent:
        """The longest usable prefix; prefers the device alone if that is nearly as long.

        `load`: longest prefix for which lower tiers may be read.
        """
        size = self._nodes.page_size
        path, tail, length = found.path, found.tail, found.length
        on_device = 0
        for node, count in path:
            if not len(node.pages):
                break
            on_device += count * size
        if tail is not None and on_device == length and self._can_end(path, tail, length):
            return Extent(length, tail)
        near = self._longest(path, on_device, lower=False)
        load = min(load // size * size, length)
        if self._min_load_tokens and near < load:
            far = self._longest(path, load, lower=True)
            if far - near >= self._min_load_tokens:
                return Extent(far, loads=True)
        return Extent(near)

    def _longest(self, path: Sequence[MatchedPages], limit: int, *, lower: bool) -> int:
        """Longest prefix, at most `limit` tokens, that all components support."""
        while True:
            before = limit
            for component in self._components:
                limit = component.longest(path, limit, lower=lower)
            if limit == before or len(self._components) == 1:
                return limit

    def _can_end(self, path: Sequence[MatchedPages], tail: Tail, length: int) -> bool:
        if not len(tail.node.pages):
            return False
        tokens = length + tail.tokens
        return all(c.can_end(path, tail.node, tail.page, tokens) for c in self._components)

    def _tail(self, node: Node, tokens: IntArray, key: CacheKey, pos: int) -> Tail | None:
        """The page below `node` with the longest partial match that a request can continue from."""
        size = self._nodes.page_size
        if self._states is None:
            leaf, count = nearest_tail(node, tokens, key, pos, size)
            return Tail(leaf, 0, count) if leaf is not None else None
        for leaf in contained_leaves(node, tokens, key, pos, size):
            if has_state(leaf, lower=False):
                return Tail(leaf, 0, len(leaf.tokens))
        return None
