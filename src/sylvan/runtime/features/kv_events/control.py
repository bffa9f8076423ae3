"""Follows the prefix tree, for the publisher."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import Place
from sylvan.runtime.features.kv_events.blocks import kv_events
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.runtime.sched.capability import Capability


class KVEvents(Capability):
    """Passes on, once per step, what earlier steps cached and evicted.

    Args:
        tree: The prefix tree.
        publisher: Publishes the events.
        media: Names of the tiers to report.
    """

    def __init__(
        self, tree: RadixCache, publisher: KVEventPublisher, media: Mapping[Place, str]
    ) -> None:
        self._tree, self._publisher, self._media = tree, publisher, dict(media)
        tree.record_events()

    def poll(self) -> None:
        changes = self._tree.take_events()
        if changes:
            empty = self._tree.total_pages == self._tree.num_nodes == 0
            size, media = self._tree.page_size, self._media
            self._publisher.publish(partial(kv_events, changes, size, media, empty=empty))
