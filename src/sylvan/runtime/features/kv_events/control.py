"""Follows the prefix tree for the publisher."""

from __future__ import annotations

from functools import partial

from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.features.kv_events.blocks import kv_events
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.runtime.sched.capability import Capability


class KVEvents(Capability):
    """Hands over, once a step, what the steps before it cached and evicted."""

    def __init__(self, tree: RadixCache, publisher: KVEventPublisher, medium: str) -> None:
        self._tree, self._publisher, self._medium = tree, publisher, medium
        tree.record_events()

    def poll(self) -> None:
        """See `Capability.poll`."""
        changes = self._tree.take_events()
        if changes:
            empty = self._tree.total_pages == 0
            size, medium = self._tree.page_size, self._medium
            self._publisher.publish(partial(kv_events, changes, size, medium, empty=empty))
