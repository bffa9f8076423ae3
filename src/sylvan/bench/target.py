"""The target of a load test: answers requests, and has a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sylvan.bench.apis import Api
from sylvan.bench.client import Client
from sylvan.bench.outcome import RequestRecord
from sylvan.bench.workload import BenchTurn


class BenchTarget(Protocol):
    """A server, or an in-process engine."""

    def clock(self) -> float:
        """Seconds from an arbitrary origin."""
        ...

    async def ask(
        self, turn: BenchTurn, history: Sequence[tuple[str, str]], adapter: str | None
    ) -> RequestRecord:
        """Send one request and read its answer; errors are part of the outcome.

        Args:
            turn: The request.
            history: Earlier turns of the conversation, and their answers.
            adapter: LoRA adapter of the request.
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
    """A server at an address.

    Attributes:
        client: HTTP client.
        api: Its API.
        model: Model name in requests.
        extra: Additional fields of each request.
    """

    client: Client
    api: Api
    model: str
    extra: Mapping[str, Any]

    def clock(self) -> float:
        return self.client.clock()

    async def ask(
        self, turn: BenchTurn, history: Sequence[tuple[str, str]], adapter: str | None
    ) -> RequestRecord:
        return await self.client.ask(
            self.api, turn, history, model=self.model, adapter=adapter, extra=self.extra
        )

    async def flush_cache(self) -> None:
        await self.client.post("/flush_cache")
