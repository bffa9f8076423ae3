"""Who owns which slot of recurrent state: requests, or prefixes that others may continue.

Layers without attention (state spaces, linear attention, short convolutions) remember a prefix in
a state of fixed size that cannot be cut back. So a cached prefix can be continued only from a
position whose state was kept; the keys and values in between are computed again.
"""

from __future__ import annotations

from collections.abc import Collection

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.eviction import EvictionPolicy
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import CacheKey, KVHandle, Match, Node, RunningState


class StateRadix(RadixCache):
    """A prefix tree whose nodes may end in a state, kept with the node and dropped with it.

    Pages are matched as ever, then cut back to the deepest node with a state.
    """

    def __init__(self, page_size: int, eviction: EvictionPolicy) -> None:
        super().__init__(page_size, eviction)
        self.holders: dict[int, Node] = {}  # slot -> the node that ends in its state
        self.dropped: list[int] = []  # slots of nodes that went; whoever owns slots takes them

    def peek(self, key: CacheKey, limit: int) -> int:
        """See `RadixCache.peek`; up to the last state."""
        node, tokens = self._roots.get(key.namespace), key.tokens[:limit]
        pos = found = 0
        while node is not None:
            child = node.children.get(self._page_key(key, pos, len(tokens)))
            if child is None:
                tail = self._ended(node, tokens, key, pos)
                return pos + len(tail.tokens) if tail is not None else found
            if self._shared(child, key, tokens, pos) < len(child.tokens):
                return found
            node, pos = child, pos + len(child.tokens)
            found = pos if node.state else found
        return found

    def match(self, key: CacheKey, limit: int, *, step: int = 0, priority: int = 0) -> Match:
        """See `RadixCache.match`; up to the last state."""
        tokens = key.tokens[:limit]
        node, length = self._descend(key, tokens, priority)
        tail = self._ended(node, tokens, key, length)
        if tail is not None and tail.born < step:
            end = (int(tail.pages[0]), len(tail.tokens))
            return Match(node, length, end, state=tail.state, known=length)
        usable = node
        while usable.parent is not None and not usable.state:
            usable = usable.parent
        return Match(usable, usable.stop, state=usable.state, known=length)

    def keep(self, key: CacheKey, slot: int) -> bool:
        """Let the prefix `key`, all of it cached, end in the state of `slot`.

        False: it is not cached up to there, or has a state already; the slot stays the caller's.
        """
        node, length = self._descend(key, key.tokens, 0)
        tail = self._ended(node, key.tokens, key, length, with_state=False)
        if tail is not None:
            node, length = tail, length + len(tail.tokens)
        if length < len(key.tokens) or not length or node.state:
            return False
        node.state = slot
        self.holders[slot] = node
        self.version += 1
        return True

    def has_state(self, key: CacheKey) -> bool:
        """Whether `keep` would find a state there."""
        return self.peek(key, len(key.tokens)) == len(key.tokens)

    def forget_oldest(self, sparing: Collection[int]) -> int:
        """Take the state unused for longest from its node, which stays; 0 if there is none."""
        free = [node for slot, node in self.holders.items() if slot not in sparing]
        if not free:
            return 0
        node = min(free, key=lambda n: n.last_used)
        slot = node.state
        del self.holders[slot]
        node.state = 0
        self.version += 1
        return slot

    def _ended(
        self, node: Node, tokens: IntArray, key: CacheKey, pos: int, *, with_state: bool = True
    ) -> Node | None:
        """The leaf below `node` of less than a page that is wholly a start of the tokens left."""
        rest = min(len(tokens) - pos, self.page_size - 1)
        for size in range(rest, 0, -1) if node.children and not key.media else ():
            child = node.children.get(tokens[pos : pos + size].tobytes())
            if child is not None and (child.state or not with_state):
                return child
        return None

    def _shorten(self, leaf: Node, count: int) -> IntArray:
        if leaf.state:
            del self.holders[leaf.state]
            self.dropped.append(leaf.state)
            leaf.state = 0
        return super()._shorten(leaf, count)


class StateSlots:
    """Slots 1..num_slots-1, each free, of one running request, or of a node of the tree.

    Slot 0 is the state that has seen nothing. When all are taken, the tree gives up those it has
    not used for longest.
    """

    def __init__(self, num_slots: int, tree: StateRadix | None) -> None:
        self.num_slots = num_slots - 1
        self._tree = tree
        self._free = list(range(num_slots - 1, 0, -1))
        self._fresh = {0}  # to be filled by the step being planned

    @property
    def free_slots(self) -> int:
        """Slots that nobody has."""
        self._collect()
        return len(self._free)

    @property
    def kept_slots(self) -> int:
        """Slots of states that the tree keeps."""
        return len(self._tree.holders) if self._tree is not None else 0

    def begin(self, match: Match, cached: int) -> RunningState | None:
        """A slot for a request that continues `match`; None while running requests have all."""
        slot = self._take({*self._fresh, match.state}) or self._take(self._fresh)
        if not slot:
            return None
        wish = match.known if match.known > cached else 0
        return RunningState(slot, cached, match.state, cached, wish)

    def end(self, kv: KVHandle, key: CacheKey) -> None:
        """The request is over after the tokens of `key`: its state goes to the tree, if it fits."""
        state, kv.state = kv.state, None
        if state is None:
            return
        fits = self._tree is not None and state.at == len(key.tokens)
        if not (fits and self._tree is not None and self._tree.keep(key, state.slot)):
            self._give(state.slot)

    def save(self, key: CacheKey) -> int:
        """A slot for the state after the cached prefix `key`, which the next step is to fill.

        0 if none is free, or the tree has that state.
        """
        if self._tree is None or self._tree.has_state(key):
            return 0
        slot = self._take(self._fresh)
        if not slot or self._tree.keep(key, slot):
            self._fresh.add(slot)
            return slot
        self._give(slot)
        return 0

    def audit(self, held: Collection[int]) -> int:
        """Take back slots that are neither free, nor of a request (`held`), nor kept by the tree.

        Returns how many. Cheap unless the counts disagree.
        """
        kept = self._tree.holders.keys() if self._tree is not None else ()
        if self.free_slots + len(held) + len(kept) == self.num_slots:
            return 0
        lost = {*range(1, self.num_slots + 1)}.difference(self._free, held, kept)
        self._free.extend(lost)
        return len(lost)

    def launched(self) -> None:
        """The step that fills what was saved is on its way: its slots may be given up again."""
        self._fresh = {0}

    def _take(self, sparing: Collection[int]) -> int:
        self._collect()
        if self._free:
            return self._free.pop()
        return self._tree.forget_oldest(sparing) if self._tree is not None else 0

    def _give(self, slot: int) -> None:
        assert slot not in self._free, "a state slot is freed twice"
        self._free.append(slot)

    def _collect(self) -> None:
        if self._tree is not None and self._tree.dropped:
            self._free.extend(self._tree.dropped)
            self._tree.dropped.clear()
