"""Compares prompts with nodes of the prefix tree; functions without side effects."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.types import (
    CacheKey,
    Node,
    common_prefix_len,
    digests,
    media_divergence,
    overlapping,
)

_TOKEN_BYTES = 4


class MatchedPages(NamedTuple):
    """The first `num_pages` pages of a node that match the prompt."""

    node: Node
    num_pages: int


@dataclass(slots=True, eq=False)
class Tail:
    """A partial match: the first `tokens` tokens of page `page` of a node."""

    node: Node
    page: int
    tokens: int


@dataclass(slots=True, eq=False)
class Walk:
    """Result of following a prompt down the tree: `length` tokens in whole pages.

    `tail` is set if they end inside a node that also shares part of the next page; otherwise `end`
    is the node where they end.
    """

    path: Sequence[MatchedPages]
    length: int
    tail: Tail | None = None
    end: Node | None = None


def page_name(key: CacheKey, pos: int, end: int, page_size: int) -> bytes:
    """Name of the page of `key` at `pos`; empty if it does not end before `end`."""
    stop = pos + page_size
    if stop > end:
        return b""
    name = key.tokens[pos:stop].tobytes()
    return name + digests(key.media, pos, stop) if key.media else name


def node_name(node: Node, page_size: int) -> bytes:
    """The key under which a parent stores this child: its first page of tokens."""
    name = node.tokens[:page_size].tobytes()
    if not node.media:
        return name
    return name + digests(node.media, node.start, node.start + page_size)


def shared_tokens(child: Node, key: CacheKey, tokens: IntArray, pos: int, page_size: int) -> int:
    """Number of tokens from `pos` on that equal those of `child`, found by its first page."""
    if child.media or key.media:
        shared = common_prefix_len(child.tokens, tokens[pos:])
        return media_divergence(child.media, key.media, pos, pos + shared) - pos
    if len(child.tokens) == page_size:
        return page_size
    return common_prefix_len(child.tokens, tokens[pos:])


def nearest_tail(
    node: Node, tokens: IntArray, key: CacheKey, pos: int, page_size: int
) -> tuple[Node | None, int]:
    """The child of `node` with the longest partial match from `pos` on, and its length.

    It is a neighbour of these tokens in the sorted child keys.
    """
    if page_size == 1 or pos >= len(tokens) or not node.order:
        return None, 0
    rest = tokens[pos : pos + page_size]
    start, order = rest.tobytes(), node.order
    if key.media:  # children with the same tokens differ in their digests
        start += digests(overlapping(key.media, pos, len(tokens)), pos, pos + page_size)
    at = bisect_left(order, start)
    best, most = None, 0
    for name in order[max(0, at - 1) : at + 1]:
        if name[:_TOKEN_BYTES] != start[:_TOKEN_BYTES]:
            continue
        child = node.children[name]
        count = common_prefix_len(child.tokens, rest)
        if child.media or key.media:
            count = media_divergence(child.media, key.media, pos, pos + count) - pos
        if count > most and len(child.pages):
            best, most = child, count
    return best, most


def contained_leaves(
    node: Node, tokens: IntArray, key: CacheKey, pos: int, page_size: int
) -> Iterator[Node]:
    """Partial-page leaves below `node` that are a prefix of the remaining tokens, longest first.

    Skips positions with media.
    """
    rest = min(len(tokens) - pos, page_size - 1)
    for size in range(rest, 0, -1) if node.children and not key.media else ():
        child = node.children.get(tokens[pos : pos + size].tobytes())
        if child is not None:
            yield child


def path_to(node: Node) -> Iterator[Node]:
    """The nodes from `node` up to the root's child."""
    while node.parent is not None:
        yield node
        node = node.parent


def whole_path(node: Node, page_size: int) -> list[MatchedPages]:
    """All pages of the nodes from the root down to `node`."""
    path = [MatchedPages(n, -(-len(n.tokens) // page_size)) for n in path_to(node)]
    path.reverse()
    return path


def walk(root: Node | None, key: CacheKey, limit: int, page_size: int) -> Walk:
    """Follow the first `limit` tokens of `key` without splitting nodes."""
    path: list[MatchedPages] = []
    tokens, pos, node = key.tokens[:limit], 0, root
    while node is not None:
        child = node.children.get(page_name(key, pos, len(tokens), page_size))
        if child is None:
            break
        shared = shared_tokens(child, key, tokens, pos, page_size)
        pages, rest = divmod(shared, page_size)
        path.append(MatchedPages(child, pages))
        if rest or shared < len(child.tokens):
            tail = Tail(child, pages, rest) if rest else None
            return Walk(path, pos + shared - rest, tail)
        node, pos = child, pos + shared
    return Walk(path, pos, end=node)
