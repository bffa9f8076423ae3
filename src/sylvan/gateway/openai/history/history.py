"""Stored responses and conversations: the parts and their routes."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.gateway.control.api import OwnRoute
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.openai.history.background import Background
from sylvan.gateway.openai.history.owners import Owners
from sylvan.gateway.openai.history.routes import HistoryRoutes
from sylvan.gateway.openai.history.store import HistoryStore
from sylvan.gateway.openai.history.turn import StoredTurn
from sylvan.utils.clock import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The stored history, and what generates and owns it.

    Attributes:
        store: The stored objects.
        background: Responses that are still generated.
        owners: Who owns what.
        max_body_bytes: Limit of bodies.
        wall: Wall clock, in seconds since the Unix epoch.
    """

    store: HistoryStore
    background: Background
    owners: Owners
    max_body_bytes: int
    wall: Clock

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes that read and change the history."""
        parts = (self.store, self.background, self.owners)
        return HistoryRoutes(*parts, self.max_body_bytes, self.wall).routes

    async def begin(self, caller: Caller, parsed: ParsedBody) -> StoredTurn:
        return await StoredTurn.begin(self.store, self.owners.of(caller), parsed)

    async def close(self) -> None:
        """Cancel background responses, and close the store."""
        await self.background.close()
        self.store.close()
