"""Cache events of workers: Sylvan's are maps, SGLang's and vLLM's are arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sylvan.protocol.malformed import MALFORMED

Hash = int | bytes


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """Consecutive blocks were stored; see `follow-the-cache.md`.

    Attributes:
        block_hashes: Hashes of the blocks.
        token_ids: Tokens of all blocks.
        block_size: Tokens per block.
        parent_block_hash: Hash of the preceding block; None at the start of a prompt.
        medium: Where the blocks are stored.
        lora_id: Adapter that computed them; None: the base model.
    """

    block_hashes: list[Hash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: Hash | None = None
    medium: str | None = None
    lora_id: int | str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    """Blocks were removed from a medium."""

    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """All blocks were removed."""


class _StoredRow(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None


class _RemovedRow(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[Hash]
    medium: str | None = None


class _ClearedRow(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared

_ENVELOPE = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_SECONDS = msgspec.msgpack.Decoder(float)
_MAP = msgspec.msgpack.Decoder(CacheEvent)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message of a publisher.

    Attributes:
        stamp_s: Publisher's wall clock, in seconds since the Unix epoch.
        events: Its events, in order, without those of adapters.
    """

    stamp_s: float
    events: Sequence[CacheEvent]


def read_batch(payload: bytes) -> EventBatch:
    """Decode a message.

    Raises:
        ValueError: It is malformed.
    """
    try:
        parts = _ENVELOPE.decode(payload)
        if len(parts) < 2:
            raise ValueError("a batch of events has a time and events")
        found = [_event(raw) for raw in _EVENTS.decode(parts[1])]
        return EventBatch(_SECONDS.decode(parts[0]), [event for event in found if event])
    except MALFORMED as error:
        raise ValueError(f"this is not a batch of cache events: {error}") from error


def _event(raw: msgspec.Raw) -> CacheEvent | None:
    first = bytes(raw)[:1]
    if first and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF)):
        event = _MAP.decode(raw)
        return None if isinstance(event, BlockStored) and event.lora_id is not None else event
    row = _ROW.decode(raw)
    if isinstance(row, _StoredRow):
        if row.lora_id is not None:
            return None
        return BlockStored(
            row.block_hashes, row.token_ids, row.block_size, row.parent_block_hash, row.medium
        )
    if isinstance(row, _RemovedRow):
        return BlockRemoved(row.block_hashes, row.medium)
    return AllBlocksCleared()
