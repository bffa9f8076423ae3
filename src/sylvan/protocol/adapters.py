"""Information about a served LoRA adapter."""

from __future__ import annotations

import msgspec


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter by the name that clients use.

    `id` combines the name and a digest of its files; requests carry it to the scheduler.
    """

    name: str
    id: str
    path: str
    rank: int
    num_bytes: int
    pinned: bool = False


def encode_adapters(adapters: list[AdapterInfo]) -> str:
    """Encode as JSON."""
    return msgspec.json.encode(adapters).decode()


def decode_adapters(text: str) -> list[AdapterInfo]:
    """Decode the output of `encode_adapters`.

    Raises:
        msgspec.MsgspecError: malformed.
    """
    return msgspec.json.decode(text, type=list[AdapterInfo])
