"""Responses that were kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

MAX_BYTES = 256 * 2**20


@dataclass(slots=True)
class Stored:
    """One response, and the conversation that led to it.

    Attributes:
        tenant: To whom it belongs; nobody else can read it.
        reply: As clients see it.
        items: Input of this and all earlier turns.
        task: What still works on it.
        num_bytes: Size when it was kept.
    """

    tenant: str
    reply: dict[str, Any]
    items: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0


class ResponseStore:
    """The latest responses, in memory: bounded in number and in bytes, the oldest go first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bytes = 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._size > 0

    def put(self, stored: Stored) -> None:
        """Keep a response, or what has become of it."""
        if not self.enabled:
            return
        name = stored.reply["id"]
        self.drop(name)
        stored.num_bytes = len(orjson.dumps(stored.items)) + len(orjson.dumps(stored.reply))
        self._kept[name] = stored
        self._bytes += stored.num_bytes
        while len(self._kept) > self._size or (self._bytes > MAX_BYTES and len(self._kept) > 1):
            self.drop(next(iter(self._kept)))

    def get(self, name: str, tenant: str) -> Stored | None:
        """A response of the tenant."""
        found = self._kept.get(name)
        return found if found is not None and found.tenant == tenant else None

    def drop(self, name: str) -> None:
        """Forget a response."""
        dropped = self._kept.pop(name, None)
        if dropped is not None:
            self._bytes -= dropped.num_bytes
