"""The rendezvous of a prefill and a decode worker: fields that both get in the body."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from sylvan.gateway.http.parsed_body import Fields
from sylvan.gateway.http.sender import spliced
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.sampling import MAX_N

MAX_ROOM = (1 << 63) - (1 << 16)
"""Rooms have 63 bits; workers count up from a room if a request has several samples."""
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of one pair.

    Attributes:
        host: Host of the prefill worker.
        port: Port of its bootstrap server; None: the default.
        room: Identifies the request, or one prompt of a batch.
    """

    host: str
    port: int | None
    room: int


def new_rendezvous(prefill: Worker, max_room: int = MAX_ROOM) -> Rendezvous:
    """Choose a rendezvous at a prefill worker.

    Decode workers compute the prefill side's data-parallel rank as the room modulo the number of
    ranks, so the room of a worker that is one rank is chosen to yield that rank.

    Args:
        prefill: The prefill worker.
        max_room: Upper bound of rooms, exclusive.
    """
    room = secrets.randbelow(max_room)
    ranks = prefill.found.dp_size
    if prefill.dp_rank is not None:
        room = max(0, room - ranks) // ranks * ranks + prefill.dp_rank
    return Rendezvous(prefill.spec.host, prefill.spec.bootstrap_port, room)


def batch_size(path: str, fields: Fields) -> int | None:
    """Return the number of prompts or chat samples; None: one prompt, whose room is a scalar.

    Invalid batches count as one prompt; the worker will reject them.
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


def without_rendezvous(raw: bytes, fields: Fields) -> bytes:
    """Return the body for a worker that serves it alone, without rendezvous fields of the client.

    Args:
        raw: The body, as a JSON object.
        fields: Its parsed fields.
    """
    if not any(name in fields for name in FIELDS):
        return raw
    return orjson.dumps({name: value for name, value in fields.items() if name not in FIELDS})


def with_rendezvous(
    raw: bytes, fields: Fields, size: int | None, meet: Callable[[], Rendezvous]
) -> bytes:
    """Return the body with rendezvous fields for both workers, replacing those of the client.

    Args:
        raw: The body, as a JSON object.
        fields: Its parsed fields.
        size: See `batch_size`.
        meet: Chooses a rendezvous; called once per prompt of a batch.
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
