"""Which cached prefix goes first when memory is short: one file a policy, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sylvan.runtime.cache.types import Node
from sylvan.utils import plugins

EvictionPolicy = Callable[[Node], tuple[int, ...]]
"""Rank of a leaf, always of the same length; the smallest goes first."""


def eviction_policy(name: str) -> EvictionPolicy:
    """Return the eviction policy `name`.

    Raises:
        ConfigError: no such policy.
    """
    return plugins.load(sys.modules[__name__], name).key
