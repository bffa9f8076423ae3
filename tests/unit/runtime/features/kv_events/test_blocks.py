"""Blocks by hash, as routers count them."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from sylvan.runtime.cache.eviction import eviction_policy
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import CacheKey, MediaSpan, Place
from sylvan.runtime.features.kv_events.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    chain,
    kv_events,
)

CPU = {Place.DEVICE: "CPU"}


def key(tokens, namespace: str = "", media: tuple[MediaSpan, ...] = ()) -> CacheKey:
    return CacheKey(np.array(tokens, np.int32), namespace, media)


def insert(tree: RadixCache, tokens, first_page: int, namespace: str = "") -> None:
    pages = np.arange(first_page, first_page - (-len(tokens) // tree.page_size), dtype=np.int32)
    tree.insert(key(tokens, namespace), pages, with_tail=True)


def test_a_hash_stands_for_the_whole_prefix():
    assert chain(key([1, 2, 3, 4]), 2) == chain(key([1, 2, 3, 4, 5]), 2)
    assert chain(key([1, 2, 3, 4]), 2)[1] != chain(key([9, 9, 3, 4]), 2)[1]
    assert len(chain(key([1]), 2)) == 0


def test_namespaces_and_images_are_part_of_the_hash():
    plain = chain(key([1, 2, 3, 4]), 2)
    assert not set(plain) & set(chain(key([1, 2, 3, 4], "tenant"), 2))
    image = chain(key([1, 2, 3, 4], media=(MediaSpan(3, 4, b"image"),)), 2)
    assert image[0] == plain[0]
    assert image[1] != plain[1]


def test_the_hash_is_the_documented_one():
    data = bytes(8) + (7).to_bytes(4, "little") + (8).to_bytes(4, "little")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    assert chain(key([7, 8]), 2) == [int.from_bytes(digest, "little", signed=True)]


def test_events_name_blocks_and_their_parent():
    tree = RadixCache(2, eviction_policy("lru"))
    tree.record_events()
    insert(tree, [1, 2, 3, 4], 1)
    insert(tree, [1, 2, 3, 4, 5, 6, 7], 3)
    whole = chain(key([1, 2, 3, 4, 5, 6]), 2)

    first, second = kv_events(tree.take_events(), 2, CPU, empty=False)
    assert first == BlockStored(whole[:2], [1, 2, 3, 4], 2, None, "CPU")
    assert second == BlockStored(whole[2:], [5, 6], 2, whole[1], "CPU")


def test_blocks_of_an_adapter_say_so():
    tree = RadixCache(2, eviction_policy("lru"))
    tree.record_events()
    legal = "team:legal@0123456789abcdef"
    for number, namespace in enumerate(("", ":salt", f"{legal}:", f"{legal}:salt", f":{legal}:")):
        insert(tree, [1, 2], 1 + number, namespace)

    events = kv_events(tree.take_events(), 2, CPU, empty=False)

    assert [e.lora_id for e in events] == [None, None, legal, legal, None]
    assert [e.lora_name for e in events] == [None, None, "team:legal", "team:legal", None]
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(events[0]))
    assert "lora_id" not in plain


def test_a_split_node_is_evicted_under_the_hashes_it_was_stored_with():
    tree = RadixCache(2, eviction_policy("lru"))
    tree.record_events()
    insert(tree, [1, 2, 3, 4, 5, 6], 1)
    insert(tree, [1, 2, 7, 8], 10)  # splits after [1, 2]
    stored = {
        name
        for event in kv_events(tree.take_events(), 2, CPU, empty=False)
        if isinstance(event, BlockStored)
        for name in event.block_hashes
    }
    tree.clear()

    events = kv_events(tree.take_events(), 2, CPU, empty=tree.total_pages == 0)
    assert isinstance(events.pop(), AllBlocksCleared)
    removed = [n for e in events if isinstance(e, BlockRemoved) for n in e.block_hashes]
    assert sorted(removed) == sorted(stored)


def test_less_than_a_block_is_not_published():
    tree = RadixCache(4, eviction_policy("lru"))
    tree.record_events()
    insert(tree, [1, 2, 3], 1)
    assert kv_events(tree.take_events(), 4, CPU, empty=False) == []
