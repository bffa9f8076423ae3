"""What is put under load: answers one request after the other, and tells the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sylvan.bench.apis import Api
from sylvan.bench.client import Client
from sylvan.bench.outcome import RequestRecord
from sylvan.bench.workload import BenchTurn


class BenchTarget(Protocol):
    """A server, or an engine in this process."""

    def clock(self) -> float:
        """Seconds, from an arbitrary moment."""
        ...

    async def ask(
        self, turn: BenchTurn, said: Sequence[tuple[str, str]], adapter: str | None
    ) -> RequestRecord:
        """Send one request and take in its answer; what goes wrong is part of the outcome.

        Args:
            turn: What is asked.
            said: Earlier turns of the conversation, and their answers.
            adapter: LoRA adapter that the request names.
        """
        ...

    async def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            TargetError: It cannot be emptied.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server behind an address.

    Attributes:
        client: Its connections.
        api: How it is asked.
        model: What requests name.
        extra: Further fields of each request.
    """

    client: Client
    api: Api
    model: str
    extra: Mapping[str, Any]

    def clock(self) -> float:
        return self.client.clock()

    async def ask(
        self, turn: BenchTurn, said: Sequence[tuple[str, str]], adapter: str | None
    ) -> RequestRecord:
        return await self.client.ask(
            self.api, turn, said, model=self.model, adapter=adapter, extra=self.extra
        )

    async def flush_cache(self) -> None:
        await self.client.post("/flush_cache")
