"""Events of the prefix tree, for external subscribers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.matching import path_to
from sylvan.runtime.cache.types import CacheKey, Node, Place

MAX_EVENTS = 100_000
Kind = Literal["insert", "evict"]


@dataclass(frozen=True, slots=True, eq=False)
class TreeEvent:
    """Tokens of `key` from position `start` on were inserted into, or evicted from, a place."""

    kind: Kind
    key: CacheKey
    start: int
    place: Place = Place.DEVICE

    @property
    def tokens(self) -> IntArray:
        """The inserted or evicted tokens."""
        return self.key.tokens[self.start :]


class EventLog:
    """Collects the newest `MAX_EVENTS` events, once there is a subscriber."""

    def __init__(self) -> None:
        self._events: deque[TreeEvent] | None = None

    @property
    def on(self) -> bool:
        """Whether events are recorded."""
        return self._events is not None

    def record(self) -> None:
        """Start recording events."""
        self._events = self._events or deque(maxlen=MAX_EVENTS)

    def take(self) -> list[TreeEvent]:
        """Events since the last call."""
        events = list(self._events or ())
        if self._events is not None:
            self._events.clear()
        return events

    def add(self, kind: Kind, node: Node, count: int, place: Place = Place.DEVICE) -> None:
        """Record that the last `count` tokens of a node were inserted or evicted."""
        if self._events is None or not count:
            return
        path = [*path_to(node)][::-1]
        tokens = np.concatenate([each.tokens for each in path])
        media = tuple({span: None for each in path for span in each.media})
        key = CacheKey(tokens, node.namespace, media)
        self._events.append(TreeEvent(kind, key, node.stop - count, place))
