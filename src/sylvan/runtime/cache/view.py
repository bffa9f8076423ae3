"""Describes the prefix tree as bounded plain data, for `/cache/...` and the UI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import TENANT, CacheKey, MediaSpan, Node, Place, digests

HEAD_TOKENS = 16
MAX_HIDDEN = 10_000  # shared nodes traversed in search of a tenant's nodes
MAX_NAMESPACES = 1000

Reason = Literal["all_cached", "never_seen", "evicted", "other_namespace"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt diverges from the cache.

    `ours` are the prompt's tokens from there on, `theirs` those of the nearest cached branch, up to
    `HEAD_TOKENS` each.
    """

    position: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


def tree_view(tree: RadixCache, *, max_nodes: int, owner: str | None = None) -> Mapping[str, Any]:
    """The largest nodes first, breadth first, at most `max_nodes`.

    Each node has its id, its parent's id, position, length in tokens, first tokens, device pages,
    locks, hits, last use, salt, and the tiers that hold its KV. With an `owner` (see `owned`),
    nodes of other tenants and global counts are left out.
    """
    nodes: list[Mapping[str, Any]] = []
    roots, hidden = tree.roots(), 0
    tops = [root for name, root in roots.items() if _may_own(name, owner)]
    level = [(node, -1) for root in tops for node in _visible_children(root, owner)]
    while level and len(nodes) < max_nodes and hidden < MAX_HIDDEN:
        level.sort(key=lambda pair: -len(pair[0].tokens))
        below: list[tuple[Node, int]] = []
        for node, parent in level:
            if len(nodes) == max_nodes or hidden == MAX_HIDDEN:
                break
            shown = _owned(node, owner)
            below.extend(
                (child, len(nodes) if shown else -1) for child in _visible_children(node, owner)
            )
            hidden += not shown
            if shown:
                nodes.append(_node_view(node, len(nodes), parent))
        level = below
    view: dict[str, Any] = {"page_size": tree.page_size, "shown_nodes": len(nodes)}
    if owner is None:
        view |= {
            "num_nodes": tree.num_nodes,
            "cached_tokens": tree.total_pages * tree.page_size,
            "evictable_tokens": tree.evictable_pages * tree.page_size,
            "namespaces": len(roots),
        }
    return view | {"nodes": nodes}


def owned(namespace: str, media: tuple[MediaSpan, ...], owner: str | None) -> bool:
    """Whether a node belongs to the tenant whose salts start with `owner`; None owns everything.

    The salt is part of the namespace, `adapter:salt`, or of a span after a shared start.
    """
    if owner is None or namespace.partition(":")[2].startswith(owner):
        return True
    return any(span.digest.startswith(TENANT + owner.encode()) for span in media)


def _may_own(namespace: str, owner: str | None) -> bool:
    """Whether a namespace may contain a tenant's nodes: its own, or one without a salt."""
    salt = namespace.partition(":")[2]
    return owner is None or not salt or salt.startswith(owner)


def _visible_children(node: Node, owner: str | None) -> Iterable[Node]:
    """Children that may lead to nodes of `owner`; other tenants' nodes lead to none."""
    children = node.children.values()
    if owner is None:
        return children
    return [child for child in children if not _of_tenant(child) or _owned(child, owner)]


def why_missed(tree: RadixCache, key: CacheKey, cached: int, limit: int) -> Reason:
    """Why a lookup of `key` found only `cached` of `limit` tokens."""
    if cached >= limit:
        return "all_cached"
    start = cached // tree.page_size * tree.page_size
    page = key.tokens[start : start + tree.page_size].tobytes()
    page += digests(key.media, start, start + tree.page_size)
    before = int(key.tokens[start - 1]) if start else -1
    if tree.ghosts.known(key.namespace, start, before, page):
        return "evicted"
    others = [name for name in tree.roots() if name != key.namespace][:MAX_NAMESPACES]
    for name in others:
        if tree.peek(CacheKey(key.tokens, name, key.media), limit) > cached:
            return "other_namespace"
    return "never_seen"


def divergence(
    tree: RadixCache, key: CacheKey, cached: int, owner: str | None = None
) -> Divergence:
    """Where `key` leaves the tree after `cached` tokens, and what is cached there instead.

    With an `owner` (see `owned`), only its own branches are reported.
    """
    ours = tuple(key.tokens[cached : cached + HEAD_TOKENS].tolist())
    node, pos = tree.roots().get(key.namespace), 0
    while node is not None:
        below = node.children.get(_name(key, pos, tree.page_size))
        if below is None or pos + len(below.tokens) > cached:
            break
        node, pos = below, pos + len(below.tokens)
    theirs: tuple[int, ...] = ()
    for child in _nearest(node, key, pos, tree.page_size) if node else ():
        if not _owned(child, owner):
            continue
        tokens = child.tokens[cached - pos : cached - pos + HEAD_TOKENS].tolist()
        if tokens and tuple(tokens)[:1] != ours[:1]:
            theirs = tuple(tokens)
            break
    return Divergence(cached, ours, theirs)


def _nearest(node: Node, key: CacheKey, pos: int, page_size: int) -> list[Node]:
    """Children of `node` whose first page is close to that of `key` in sorted order."""
    order = node.order or sorted(node.children)
    at = bisect_left(order, _name(key, pos, page_size))
    near = [node.children[name] for name in order[max(0, at - 1) : at + 2]]
    return [child for child in near if not _of_another(child, key)]


def _name(key: CacheKey, pos: int, page_size: int) -> bytes:
    page = key.tokens[pos : pos + page_size].tobytes()
    return page + digests(key.media, pos, pos + page_size)


def _of_another(node: Node, key: CacheKey) -> bool:
    """Whether another tenant added `node` to a shared start."""
    return any(s.digest.startswith(TENANT) and s not in key.media for s in node.media)


def _of_tenant(node: Node) -> bool:
    """Whether any tenant added `node` to a shared start."""
    return any(span.digest.startswith(TENANT) for span in node.media)


def _salt(node: Node) -> str:
    """The salt that isolates a node; empty if it is shared."""
    salt = node.namespace.partition(":")[2]
    for span in node.media:
        if span.digest.startswith(TENANT):
            salt = span.digest.removeprefix(TENANT).decode()
    return salt


def _owned(node: Node, owner: str | None) -> bool:
    return owned(node.namespace, node.media, owner)


def _node_view(node: Node, number: int, parent: int) -> Mapping[str, Any]:
    return {
        "id": number,
        "parent": parent,
        "namespace": node.namespace,
        "start": node.start,
        "tokens": len(node.tokens),
        "head": node.tokens[:HEAD_TOKENS].tolist(),
        "pages": len(node.pages),
        "locks": node.locks,
        "hits": node.hits,
        "last_used": node.last_used,
        "children": len(node.children),
        "salt": _salt(node),
        "places": [str(place.name).lower() for place in Place if place in node.places],
    }
