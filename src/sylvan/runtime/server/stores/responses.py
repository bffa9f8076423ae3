"""Stored responses."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from sylvan.utils.clock import Clock, monotonic


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response, and the conversation that led to it, as JSON.

    Attributes:
        name: Its ID, unique within its tenant.
        tenant: Its owner; no other tenant can read it.
        task: The task that still generates it.
    """

    name: str
    tenant: str
    _reply: bytes
    _items: bytes
    _until: float = math.inf
    task: asyncio.Task[None] | None = None

    @property
    def reply(self) -> dict[str, Any]:
        """The response as clients see it."""
        return orjson.loads(self._reply)

    @property
    def items(self) -> list[dict[str, Any]]:
        """Input of this and all earlier turns."""
        return orjson.loads(self._items)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return len(self._reply) + len(self._items)

    def is_kept(self, now: float) -> bool:
        """Whether it has not expired."""
        return now < self._until

    def change_items(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Replace the input."""
        self._items = orjson.dumps(items)

    def change(self, changes: Mapping[str, Any]) -> None:
        """Replace fields of the reply."""
        self._reply = orjson.dumps({**self.reply, **changes})


class ResponseStore:
    """The newest responses, in memory.

    When there are too many or they are too large, the oldest response of the tenant with the most
    bytes is evicted, so no tenant can evict those of tenants who store less.

    Args:
        size: Largest number of responses.
        max_bytes: Largest total size.
        retention_s: Age in seconds at which a response expires.
        clock: Clock for ages.
    """

    def __init__(
        self,
        size: int,
        max_bytes: int,
        retention_s: float = math.inf,
        clock: Clock = monotonic,
    ) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._retention_s = retention_s
        self._clock = clock
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}

    @property
    def enabled(self) -> bool:
        """Whether responses are stored at all."""
        return self._size > 0

    @property
    def num_bytes(self) -> int:
        """Total size in bytes."""
        return sum(self._bytes_of(tenant) for tenant in self._tenants)

    def put(
        self, tenant: str, reply: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> StoredResponse:
        """Store a response; replaces one of the same tenant and ID."""
        name = reply["id"]
        until = self._clock() + self._retention_s
        stored = StoredResponse(name, tenant, orjson.dumps(reply), orjson.dumps(items), until)
        if self.enabled:
            kept = self._tenants.setdefault(tenant, OrderedDict())
            kept.pop(name, None)
            kept[name] = stored
            self._shrink()
        return stored

    def change(self, stored: StoredResponse, changes: Mapping[str, Any]) -> None:
        """Replace fields of a reply."""
        stored.change(changes)
        self._shrink()

    def change_items(self, stored: StoredResponse, items: Sequence[Mapping[str, Any]]) -> None:
        """Replace the input of a response, or the items of a conversation."""
        stored.change_items(items)
        self._shrink()

    def get(self, name: str, tenant: str) -> StoredResponse | None:
        """Return a response of the tenant."""
        self._forget_old()
        return self._tenants.get(tenant, {}).get(name)

    def drop(self, stored: StoredResponse) -> None:
        """Delete a response."""
        kept = self._tenants.get(stored.tenant, OrderedDict())
        if kept.get(stored.name) is stored:
            del kept[stored.name]
        if not kept:
            self._tenants.pop(stored.tenant, None)

    def _forget_old(self) -> None:
        now = self._clock()
        for kept in tuple(self._tenants.values()):
            while kept and not (oldest := next(iter(kept.values()))).is_kept(now):
                self.drop(oldest)

    def _shrink(self) -> None:
        self._forget_old()
        while (
            sum(map(len, self._tenants.values())) > self._size or self.num_bytes > self._max_bytes
        ):
            largest = max(self._tenants, key=self._bytes_of)
            self.drop(next(iter(self._tenants[largest].values())))

    def _bytes_of(self, tenant: str) -> int:
        return sum(stored.num_bytes for stored in self._tenants[tenant].values())
