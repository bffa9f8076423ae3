"""The interface of KV groups beyond the first in the prefix tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sylvan.runtime.cache.matching import MatchedPages
from sylvan.runtime.cache.types import Node


class Component(Protocol):
    """Memory of one further KV group that tree nodes hold.

    It may evict from a node at any time; `longest` then returns less.
    """

    def on_split(self, upper: Node, lower: Node, num_pages: int) -> None:
        """The first `num_pages` pages of `lower` became a separate node, `upper`."""
        ...

    def on_leave(self, node: Node, keep: int) -> None:
        """Truncate `node` to its first `keep` pages on the device."""
        ...

    def longest(self, path: Sequence[MatchedPages], limit: int, *, lower: bool) -> int:
        """Longest prefix of at most `limit` tokens from which this group can continue.

        Args:
            path: Nodes from the root down, at least `limit` tokens.
            limit: In whole pages.
            lower: Also count KV in lower tiers.
        """
        ...

    def can_end(self, path: Sequence[MatchedPages], tail: Node, page: int, tokens: int) -> bool:
        """Whether this group can continue, on the device, after `tokens` tokens that end in `tail`.

        Args:
            path: All whole pages before the one that the tokens end in.
            tail: The node with this page.
            page: Index of the page in that node.
            tokens: Length of the whole prefix.
        """
        ...
