"""Eviction policies: which cached prefix is evicted first. One file per policy, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sylvan.runtime.cache.types import Node
from sylvan.utils import plugins

EvictionPolicy = Callable[[Node], tuple[int, ...]]
"""Rank of a leaf, as a tuple of fixed length; the smallest is evicted first."""


def eviction_policy(name: str) -> EvictionPolicy:
    """Return the eviction policy `name`.

    Raises:
        ConfigError: no such policy.
    """
    return plugins.load(sys.modules[__name__], name).key
