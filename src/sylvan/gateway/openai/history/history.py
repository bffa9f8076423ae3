"""The history of responses and conversations as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.gateway.control.api import Own
from sylvan.gateway.http.asked import ParsedBody
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.openai.history.background import Background
from sylvan.gateway.openai.history.owners import Owners
from sylvan.gateway.openai.history.routes import HistoryRoutes
from sylvan.gateway.openai.history.store import HistoryStore
from sylvan.gateway.openai.history.turn import StoredTurn
from sylvan.utils.clock import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Keeps what clients can go on from.

    Attributes:
        store: What is kept.
        background: What is still being made.
        owners: Whose is what.
        max_body_bytes: Bound on bodies.
        wall: Seconds since 1970.
    """

    store: HistoryStore
    background: Background
    owners: Owners
    max_body_bytes: int
    wall: Clock

    @property
    def routes(self) -> tuple[Own, ...]:
        """Routes that read and change it."""
        parts = (self.store, self.background, self.owners)
        return HistoryRoutes(*parts, self.max_body_bytes, self.wall).routes

    async def begin(self, caller: Caller, asked: ParsedBody) -> StoredTurn:
        return await StoredTurn.begin(self.store, self.owners.of(caller), asked)

    async def close(self) -> None:
        """End what is still being made, and close the store."""
        await self.background.close()
        self.store.close()
