"""Types and small array helpers shared by the cache package."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sylvan.protocol.arrays import IntArray


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Positions [start, stop) that stand for an image or a video of this content digest."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class CacheKey:
    """What decides whether two prefixes hold the same KV.

    `namespace` keeps apart what must never be shared: adapters, tenants, salts.
    """

    tokens: IntArray
    namespace: str = ""
    media: tuple[MediaSpan, ...] = ()


@dataclass(slots=True, eq=False)
class KVHandle:
    """KV memory of one request: `pages` in token order, room for `len(pages) * page_size` tokens.

    pages[:shared] are borrowed from the prefix tree, where `node` keeps them locked; the rest
    belong to this handle alone. `cached` tokens were found computed when it was acquired: whole
    shared pages, and possibly the first tokens of an own page that `Batch.copies` fills.
    `pages` is a buffer that grows in place; `num_pages` says how much of it counts.
    """

    node: object
    pages: IntArray
    num_pages: int
    shared: int
    cached: int
    namespace: str = ""
    copies: list[tuple[int, int, int]] = field(default_factory=list)

    def view(self) -> IntArray:
        """The pages that count."""
        return self.pages[: self.num_pages]


def common_prefix_len(a: IntArray, b: IntArray) -> int:
    """Number of leading positions where `a` and `b` agree."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
