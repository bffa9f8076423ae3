"""Follows KV events as a router does."""

from __future__ import annotations

from collections.abc import Iterable

from sylvan.runtime.cache.events import TreeEvent
from sylvan.runtime.cache.types import Place
from sylvan.runtime.features.kv_events.blocks import BlockRemoved, BlockStored, kv_events

MEDIA = {place: place.name for place in (Place.DEVICE, Place.HOST)}


def follow(
    changes: Iterable[TreeEvent], page_size: int, known: dict[str, set[int]]
) -> dict[str, set[int]]:
    """Return the hashes of the blocks in each medium after some changes."""
    there = {name: set(known.get(name, ())) for name in MEDIA.values()}
    for event in kv_events(changes, page_size, MEDIA, empty=False):
        match event:
            case BlockStored():
                assert not there[event.medium] & set(event.block_hashes), "it was there"
                there[event.medium] |= set(event.block_hashes)
            case BlockRemoved():
                assert there[event.medium] >= set(event.block_hashes), "it was not there"
                there[event.medium] -= set(event.block_hashes)
            case _:
                raise AssertionError(event)
    return there
