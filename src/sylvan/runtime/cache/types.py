"""Types and small array helpers shared by the cache package."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sylvan.protocol.arrays import IntArray


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Positions [start, stop) that stand for an image or a video of this content digest."""

    start: int
    stop: int
    digest: bytes


TENANT = b"tenant:"
_FOREVER = 1 << 62


def tenant_span(start: int, salt: str) -> MediaSpan:
    """Sets the positions from `start` on apart from all whose salt is another.

    What stands before them, a system prompt that the operator declared public, is shared.
    """
    return MediaSpan(start, _FOREVER, TENANT + salt.encode())


@dataclass(slots=True, eq=False)  # not frozen: that makes its constructor three times as slow
class CacheKey:
    """What decides whether two prefixes hold the same KV.

    `namespace` keeps apart what must never be shared: adapters, tenants, salts. None of the three
    changes. What is kept for the next look: `first`, the name of the first page, and `reached`,
    how far it came.
    """

    tokens: IntArray
    namespace: str = ""
    media: tuple[MediaSpan, ...] = ()
    first: bytes = b""
    reached: Reached | None = None


NO_CHILDREN: dict[bytes, Node] = {}
"""Of leaves, which most nodes are; read only."""

NO_ORDER: list[bytes] = []
"""See `NO_CHILDREN`."""


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the prefix tree: the KV of `tokens` lies in `pages`.

    Only a leaf may end inside a page. `locks` counts the requests whose borrowed prefix ends at or
    below this node. `born` is the step that computes the KV: inside a page it may be copied from in
    later steps only.
    """

    tokens: IntArray
    pages: IntArray
    parent: Node | None
    start: int = 0  # position of the first token
    namespace: str = ""
    children: dict[bytes, Node] = field(default_factory=lambda: NO_CHILDREN)  # read only
    order: list[bytes] = field(default_factory=lambda: NO_ORDER)  # their names, sorted, if kept
    media: tuple[MediaSpan, ...] = ()
    locks: int = 0
    last_used: int = 0  # logical clock; larger is more recent
    created: int = 0
    hits: int = 0
    priority: int = 0  # of the most urgent request that used it
    born: int = 0
    state: int = 0  # slot of the recurrent state after the last token; 0: none is kept
    offered: int = 0  # number of its last offer to be evicted
    queued: int = 0  # number of the offer by which it stands in the queue of leaves; 0: it does not
    rank: tuple[int, ...] = ()  # at that offer

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def use(self, now: int, priority: int) -> None:
        """A request of that priority uses this part of its prefix."""
        self.last_used = now
        self.hits += 1
        self.priority = max(self.priority, priority)

    def adopt(self, name: bytes, child: Node, *, ordered: bool) -> None:
        """Add a child; all calls for a node agree on whether to keep an order."""
        if self.children is NO_CHILDREN:
            self.children = {name: child}
            if ordered:
                self.order = [name]
        else:
            self.children[name] = child
            if ordered:
                insort(self.order, name)

    def disown(self, name: bytes) -> None:
        """Remove a child."""
        del self.children[name]
        if self.order:
            del self.order[bisect_left(self.order, name)]


def below(roots: Iterable[Node]) -> Iterator[Node]:
    """All nodes of trees but their roots, in any order."""
    stack = [child for root in roots for child in root.children.values()]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


@dataclass(slots=True, eq=False)
class Match:
    """`length` tokens in whole pages end at `node`; `tail` is a page whose first tokens fit too.

    `state` is the slot of the recurrent state after all of them; `known` tokens are cached without
    one being there.
    """

    node: Node
    length: int
    tail: tuple[int, int] | None = None  # (page, tokens)
    state: int = 0
    known: int = 0


@dataclass(slots=True, eq=False)
class Insertion:
    """`length` leading tokens now end at `node`, `cached` of which were there before.

    `freed` are pages that the new entry made superfluous; the caller owns them now.
    """

    node: Node
    length: int
    cached: int
    freed: IntArray


@dataclass(slots=True, eq=False)
class Reached:
    """The last node all of which the first `limit` tokens of a key begin with.

    It ends before position `stop`, and `next_page` is the name of the page there.
    """

    node: Node
    stop: int
    next_page: bytes
    limit: int

    def stands(self, limit: int) -> bool:
        """Whether the node is still there: what is above a node goes after it."""
        node = self.node
        in_tree = node.parent is not None and node.start + len(node.tokens) == self.stop
        return in_tree and limit == self.limit


@dataclass(slots=True, eq=False)
class RunningState:
    """What layers without attention remember of one request, in a slot of its own.

    `slot` holds the state after `at` tokens once all steps in flight are done. Before its first
    step, which starts at token `begun`, it is copied from `source` (slot 0 has seen nothing).
    `saves` are for the step being launched: (tokens, slot) to keep a copy in on the way. `wish` is
    a length that others share without a state there: worth keeping one.
    """

    slot: int
    begun: int
    source: int = 0
    at: int = 0
    wish: int = 0
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, eq=False)
class KVHandle:
    """KV memory of one request: page numbers in token order.

    pages[:shared] are borrowed from the prefix tree, where `node` keeps them locked; the rest up to
    `num_pages` belong to this handle alone. `cached` tokens were found computed when it was
    acquired: whole shared pages and, if `tail` is set, the first tokens of the next page, which
    are to be copied from that page of the tree.

    `pages` is a buffer that grows in place. Whoever keeps a copy of it looks at `version`: as long
    as that stays, page numbers were only appended.
    """

    node: Node
    key: CacheKey
    pages: IntArray
    num_pages: int
    shared: int
    cached: int
    tail: tuple[int, int] | None = None  # (page, tokens)
    version: int = 0
    state: RunningState | None = None  # of models that have any

    def view(self) -> IntArray:
        """The page numbers, oldest first."""
        return self.pages[: self.num_pages]


def overlapping(media: tuple[MediaSpan, ...], start: int, stop: int) -> tuple[MediaSpan, ...]:
    """The spans that cover any of the positions [start, stop)."""
    if not media:
        return media
    return tuple(s for s in media if s.start < stop and s.stop > start)


def digests(media: tuple[MediaSpan, ...], start: int, stop: int) -> bytes:
    """What tells those positions from the same tokens with other contents.

    A span that begins among them says where: the same tokens may be apart from there or from here.
    """
    return b"".join(
        s.digest + b"@%d" % (s.start - start) if s.start > start else s.digest
        for s in overlapping(media, start, stop)
    )


def common_prefix_len(a: IntArray, b: IntArray) -> int:
    """Number of leading positions where `a` and `b` agree."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def media_divergence(
    a: tuple[MediaSpan, ...], b: tuple[MediaSpan, ...], start: int, stop: int
) -> int:
    """First position in [start, stop) from which two keys stand for different media."""
    differing = {s for s in set(a).symmetric_difference(b) if s.start < stop and s.stop > start}
    return max(start, min((s.start for s in differing), default=stop))
