"""KV events as cache-aware routers read them: token blocks identified by a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from sylvan.runtime.cache.events import TreeEvent
from sylvan.runtime.cache.types import CacheKey, Place
from sylvan.runtime.sched.lookup import adapter_of

HASH_BYTES = 8
SHARED = ("", ":")  # namespaces without adapter and salt


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    """Consecutive blocks were cached; `token_ids` are the tokens of all of them.

    `parent_block_hash` is the block before the first one; omitted at the start of a prompt.
    `lora_id` and `lora_name` name the adapter that computed this KV, if any.
    """

    block_hashes: list[int]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | None = None
    medium: str | None = None
    lora_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """The cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def chain(key: CacheKey, block_size: int) -> list[int]:
    """Hash each whole block of `key`, as signed 64-bit numbers.

    A block's hash is BLAKE2b with 8 bytes of output over the hash of the block before it, its
    token ids as little-endian int32, and the digests of the images in it. Before the first block
    come eight zero bytes or, for requests with an adapter or a salt, the hash of the namespace's
    name: equal texts of two tenants are different blocks.
    """
    is_separate = key.namespace not in SHARED
    before = _hash(key.namespace.encode()) if is_separate else bytes(HASH_BYTES)
    hashes: list[int] = []
    tokens = np.ascontiguousarray(key.tokens, "<i4")
    for start in range(0, len(tokens) - block_size + 1, block_size):
        stop = start + block_size
        media = b"".join(s.digest for s in key.media if s.start < stop and s.stop > start)
        before = _hash(before + tokens[start:stop].tobytes() + media)
        hashes.append(int.from_bytes(before, "little", signed=True))
    return hashes


def kv_events(
    changes: Iterable[TreeEvent], block_size: int, media: Mapping[Place, str], *, empty: bool
) -> list[KVEvent]:
    """Convert tree changes to block events; `empty`: the tree is empty afterwards.

    Skips tiers that have no name in `media`.
    """
    events: list[KVEvent] = []
    removed = False
    for change in changes:
        if (medium := media.get(change.place)) is None:
            continue
        hashes = chain(change.key, block_size)
        first = change.start // block_size
        if len(hashes) <= first:
            continue  # less than a block
        if change.kind == "insert":
            tokens = change.key.tokens[change.start : len(hashes) * block_size]
            parent = hashes[first - 1] if first else None
            adapter = adapter_of(change.key.namespace)
            stored = BlockStored(
                hashes[first:],
                tokens.tolist(),
                block_size,
                parent,
                medium,
                lora_id=adapter,
                lora_name=adapter and adapter.rpartition("@")[0],
            )
            events.append(stored)
        else:
            events.append(BlockRemoved(hashes[first:], medium))
            removed = True
    if empty and removed:
        events.append(AllBlocksCleared())
    return events


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
