"""Owns the slots of recurrent states: each is free, or of a running request or a cached prefix.

Layers without attention (state spaces, linear attention, short convolutions) keep a prefix as one
state of fixed size that cannot be truncated. So a cached prefix can be continued only from a
position whose state was saved; everything after it is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from sylvan.runtime.cache.matching import MatchedPages
from sylvan.runtime.cache.prefix import Match
from sylvan.runtime.cache.types import (
    ABSENT,
    CacheKey,
    KVHandle,
    Node,
    NodeParts,
    Place,
    RunningState,
)


class NodeStates:
    """Recurrent states at the ends of tree nodes; a `Component` of the tree."""

    def __init__(self) -> None:
        self.holders: dict[int, Node] = {}  # node by slot
        self.dropped: list[int] = []  # slots of removed nodes; `StateSlots` collects them

    def keep(self, node: Node, slot: int) -> bool:
        """Store the state of `slot` at the end of `node`; False if it already has one."""
        parts = node.parts
        if parts is None:
            parts = node.parts = NodeParts()
        if parts.state:
            return False
        parts.state = slot
        self.holders[slot] = node
        return True

    def drop_oldest(self, sparing: Collection[int]) -> int:
        """Take the least recently used state from its node; return its slot, 0 without one."""
        free = [node for slot, node in self.holders.items() if slot not in sparing]
        if not free:
            return 0
        node = min(free, key=lambda node: node.last_used)
        for write in node.parts.writes_from(Place.DEVICE) if node.parts else ():
            write.lost.append(write.locator.take_state())
        return self._take(node)

    def on_split(self, upper: Node, lower: Node, num_pages: int) -> None:
        """The state stays at the end of the lower node."""

    def on_leave(self, node: Node, keep: int) -> None:
        if slot := self._take(node):
            self.dropped.append(slot)

    def longest(self, path: Sequence[MatchedPages], limit: int, *, lower: bool) -> int:
        for node, _ in reversed(path):
            if node.stop <= limit and has_state(node, lower=lower):
                return node.stop
        return 0

    def can_end(self, path: Sequence[MatchedPages], tail: Node, page: int, tokens: int) -> bool:
        return tokens == tail.stop and has_state(tail, lower=False)

    def _take(self, node: Node) -> int:
        parts = node.parts
        if parts is None or not parts.state:
            return 0
        slot, parts.state = parts.state, 0
        del self.holders[slot]
        return slot


def has_state(node: Node, *, lower: bool) -> bool:
    """Whether a node has a state, on the device or, with `lower`, in a lower tier."""
    parts = node.parts
    if parts is None:
        return False
    if parts.state:
        return True
    return lower and any(locator.state != ABSENT for locator in parts.lower.values())


class StateTree(Protocol):
    """The interface of the prefix tree that `StateSlots` uses."""

    @property
    def states(self) -> NodeStates | None:
        """States that nodes of the tree hold."""
        ...

    def find(self, key: CacheKey, *, use: bool = False) -> Node | None:
        """The node that ends with the last token of `key`, if all its KV is on the device.

        With `use`, mark it as used now.
        """
        ...


class StateSlots:
    """Slots 1..num_slots-1, each free, owned by a running request, or by a tree node.

    Slot 0 is the initial state. When no slot is free, the least recently used state of the tree is
    dropped.
    """

    def __init__(self, num_slots: int, tree: StateTree | None) -> None:
        """`tree`: None if prefixes are not cached."""
        self.num_slots = num_slots - 1
        self._tree = tree
        nodes = tree.states if tree is not None else None
        self._nodes = nodes if nodes is not None else NodeStates()
        self._free = list(range(num_slots - 1, 0, -1))
        self._fresh = {0}  # slots that the step being planned fills
        self._waiting: list[RunningState] = []  # states not yet copied from their sources

    @property
    def free_slots(self) -> int:
        """Number of slots without an owner."""
        return len(self._free) + len(self._nodes.dropped)

    def begin(self, match: Match) -> RunningState | None:
        """Take a slot for a request that continues `match`; None if running requests own all."""
        slot = self._take({*self._fresh, match.state}) or self._take(self._fresh)
        if not slot:
            return None
        cached = match.total
        checkpoint = match.cached_tokens if match.cached_tokens > cached else 0
        state = RunningState(slot, cached, match.state, checkpoint_at=checkpoint)
        if match.state:
            self._waiting.append(state)
        return state

    def end(self, kv: KVHandle, key: CacheKey) -> None:
        """End a request after the tokens of `key`; move its state to the tree if possible."""
        state, kv.state = kv.state, None
        if state is None:
            return
        if state.at < 0:
            self._waiting = [other for other in self._waiting if other is not state]
        if state.at != len(key.tokens) or not self.keep(key, state.slot):
            self.give(state.slot)

    def keep(self, key: CacheKey, slot: int) -> bool:
        """Move the state of `slot` to the end of the cached prefix `key`.

        False if the prefix is not cached or has a state already; the caller then keeps the slot.
        """
        if self._tree is None or not len(key.tokens):
            return False
        node = self._tree.find(key, use=True)
        return node is not None and self._nodes.keep(node, slot)

    def slot_after(self, key: CacheKey) -> int:
        """Slot of the state at the end of the cached prefix `key`, marked as used; 0 if none."""
        node = self._tree.find(key, use=True) if self._tree is not None else None
        return node.parts.state if node is not None and node.parts is not None else 0

    def keep_or_free(self, node: Node, slot: int) -> None:
        """Give `slot` to `node` if it has no state; otherwise free the slot."""
        if not self._nodes.keep(node, slot):
            self.give(slot)

    def save(self, key: CacheKey) -> int:
        """Take a slot for the state after the cached prefix `key`, for the next step to fill.

        0 if no slot is free, or the tree has that state.
        """
        node = self._tree.find(key) if self._tree is not None else None
        if node is None or has_state(node, lower=False):
            return 0
        slot = self._take(self._fresh)
        if not slot:
            return 0
        if self.keep(key, slot):
            self._fresh.add(slot)
            return slot
        self.give(slot)
        return 0

    def audit(self, held: Collection[int]) -> int:
        """Free slots without an owner: no request (`held`), no node, not the free list.

        Returns their number. Cheap unless the counts disagree.
        """
        kept = self._nodes.holders.keys()
        if self.free_slots + len(held) + len(kept) == self.num_slots:
            return 0
        dropped = self._nodes.dropped
        lost = {*range(1, self.num_slots + 1)}.difference(self._free, dropped, held, kept)
        self._free.extend(lost)
        self._waiting = [state for state in self._waiting if state.slot in held]
        return len(lost)

    def launched(self) -> None:
        """Called after launching the step that fills saved slots; they may then be evicted."""
        self._fresh = {0}

    def give(self, slot: int) -> None:
        """Free a request's slot."""
        assert slot not in self._free, "a state slot is freed twice"
        self._free.append(slot)

    def _take(self, sparing: Collection[int]) -> int:
        sources = self._sources()
        dropped = self._nodes.dropped
        if dropped:
            self._free += [slot for slot in dropped if slot not in sources]
            dropped[:] = [slot for slot in dropped if slot in sources]
        if self._free:
            return self._free.pop()
        return self._nodes.drop_oldest(sources.union(sparing))

    def _sources(self) -> set[int]:
        """Slots that requests without a first step will copy from."""
        self._waiting = [state for state in self._waiting if state.at < 0]
        return {state.source for state in self._waiting}
