"""What the prefix tree needs from KV groups beside the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sylvan.runtime.cache.matching import MatchedPages
from sylvan.runtime.cache.types import Node


class Component(Protocol):
    """Memory of one KV group that nodes of the tree hold, beside pages of the first group.

    It may lose what a node holds at any time, on its own terms; `longest` then says less.
    """

    def on_split(self, upper: Node, lower: Node, num_pages: int) -> None:
        """The first `num_pages` pages of `lower` are a node of their own now, `upper`."""
        ...

    def on_leave(self, node: Node, keep: int) -> None:
        """`node` keeps only its first `keep` pages on the device."""
        ...

    def longest(self, path: Sequence[MatchedPages], limit: int, *, lower: bool) -> int:
        """Longest prefix of at most `limit` tokens after which layers of this group can go on.

        Args:
            path: From the root down; it holds at least `limit` tokens.
            limit: In whole pages.
            lower: Also use what lies in lower tiers.
        """
        ...

    def can_end(self, path: Sequence[MatchedPages], tail: Node, page: int, tokens: int) -> bool:
        """Whether they can go on, on the device, after `tokens` tokens that end in `tail`.

        Args:
            path: All whole pages before the one that the tokens end in.
            tail: The node that has this page.
            page: Index of the page in that node.
            tokens: Length of the whole prefix.
        """
        ...
