"""Where a prefill worker and a decode worker meet: fields that both get with a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from sylvan.gateway.http.asked import Fields
from sylvan.gateway.http.sender import spliced
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.sampling import MAX_N

MAX_ROOM = (1 << 63) - (1 << 16)
"""Rooms have 63 bits; workers that get one room for several samples count up from it."""
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(frozen=True, slots=True)
class Meeting:
    """One rendezvous of a pair.

    Attributes:
        host: Of the prefill worker.
        port: Of its bootstrap server; None: the usual one.
        room: Names the request, or one prompt of it.
    """

    host: str
    port: int | None
    room: int


def new_meeting(prefill: Worker, max_room: int = MAX_ROOM) -> Meeting:
    """A rendezvous at a prefill worker.

    Decode workers take the data-parallel rank of the prefill side to be the room modulo the number
    of ranks, so the room of a worker that is one rank leads there.

    Args:
        prefill: The worker.
        max_room: Rooms are below it.
    """
    room = secrets.randbelow(max_room)
    ranks = prefill.found.dp_size
    if prefill.dp_rank is not None:
        room = max(0, room - ranks) // ranks * ranks + prefill.dp_rank
    return Meeting(prefill.spec.host, prefill.spec.bootstrap_port, room)


def batch_size(path: str, fields: Fields) -> int | None:
    """Prompts of a batch, or samples of a chat; None: one prompt, whose room is no list.

    What a worker would refuse anyway is one prompt here.
    """
    if path == "/v1/chat/completions":
        n = fields.get("n")
        return n if type(n) is int and 1 < n <= MAX_N else None
    for name in ("text", "input_ids") if path == "/generate" else ("prompt",):
        value = fields.get(name)
        if isinstance(value, list) and value:
            items = cast("list[Any]", value)
            return None if isinstance(items[0], int) else len(items)
    return None


def without_meetings(raw: bytes, fields: Fields) -> bytes:
    """A body for one worker that serves it alone; fields that a client made up are left out.

    Args:
        raw: The body, a JSON object.
        fields: What is in it.
    """
    if not any(name in fields for name in FIELDS):
        return raw
    return orjson.dumps({name: value for name, value in fields.items() if name not in FIELDS})


def with_meetings(
    raw: bytes, fields: Fields, size: int | None, meet: Callable[[], Meeting]
) -> bytes:
    """A body with the fields that both workers get; those that a client made up are replaced.

    Args:
        raw: The body, a JSON object.
        fields: What is in it.
        size: See `batch_size`.
        meet: Makes a rendezvous; each prompt of a batch has its own.
    """
    meetings = [meet() for _ in range(size or 1)]
    rows = [(m.host, m.port, m.room) for m in meetings]
    values: Mapping[str, object]
    if size is None:
        values = dict(zip(FIELDS, rows[0], strict=True))
    else:
        values = {name: [row[i] for row in rows] for i, name in enumerate(FIELDS)}
    if any(name in fields for name in FIELDS):
        return orjson.dumps({**fields, **values})
    return spliced(raw, orjson.dumps(values)[1:-1])
