"""What trees of prefixes have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar


class TreeNode(Protocol):
    """A node whose children are its own kind."""

    @property
    def children(self) -> Mapping[Any, Self]:
        """By what leads to them."""
        ...


_Node = TypeVar("_Node", bound=TreeNode)


def below(node: _Node) -> list[_Node]:
    """All nodes under one, parents before their children."""
    found: list[_Node] = []
    stack = list(node.children.values())
    while stack:
        top = stack.pop()
        found.append(top)
        stack.extend(top.children.values())
    return found
