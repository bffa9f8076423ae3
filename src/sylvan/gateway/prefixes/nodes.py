"""Shared by the prefix trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar


class TreeNode(Protocol):
    """A node whose children have its own type."""

    @property
    def children(self) -> Mapping[Any, Self]:
        """The children, by key."""
        ...


_Node = TypeVar("_Node", bound=TreeNode)


def below(node: _Node) -> list[_Node]:
    """Return all nodes below one, parents before children."""
    found: list[_Node] = []
    stack = list(node.children.values())
    while stack:
        top = stack.pop()
        found.append(top)
        stack.extend(top.children.values())
    return found
