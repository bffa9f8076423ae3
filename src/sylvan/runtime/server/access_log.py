"""The access log: one line per call; status 499 if the client disconnected."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sylvan.runtime.server.endpoint import CLIENT_GONE
from sylvan.runtime.server.streaming import GONE
from sylvan.utils.clock import Clock

log = logging.getLogger("sylvan.access")


class AccessLog:
    """Logs method, path, status and duration of each call."""

    def __init__(self, app: ASGIApp, clock: Clock, exclude: tuple[str, ...] = ()) -> None:
        """`exclude`: path prefixes that are not logged."""
        self._app = app
        self._exclude = exclude
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        if scope["type"] != "http" or scope["path"].startswith(self._exclude):
            await self._app(scope, receive, send)
            return
        status = 500
        began = self._clock()

        def watched(message: Message) -> Awaitable[None]:  # no coroutine of its own for each token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            shown = CLIENT_GONE if scope.get(GONE) else status
            ms = (self._clock() - began) * 1000
            path = scope["path"].encode("unicode_escape").decode("ascii")[:200]
            log.info("%s %s %d %.1f ms", scope["method"], path, shown, ms)
