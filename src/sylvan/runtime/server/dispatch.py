"""Finds the handler of a path."""

from __future__ import annotations

import threading
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from sylvan.runtime.server.endpoint import Handle, Routes
from sylvan.runtime.server.headers import QuickRequest
from sylvan.runtime.server.openapi import describe
from sylvan.utils.threads import call_in_thread


class PathDispatcher:
    """Dispatches exact paths directly to their handlers; FastAPI matches the others.

    FastAPI's layers take a fifth of the time of a short call, and only find the handler here:
    handlers answer errors themselves. It is imported with the first call that needs it, for which a
    start would wait longer than for all else that a server imports.

    Args:
        routes: Endpoints and their handlers.
        root_path: Prefix of all paths; with one, FastAPI matches every path.
    """

    def __init__(self, routes: Routes, root_path: str) -> None:
        self._routes, self._root_path = routes, root_path
        self._handles: dict[tuple[str, str], Handle] = {}
        if not root_path:
            for endpoint, handle in routes:
                if "{" not in endpoint.path:
                    self._handles |= {
                        (endpoint.path, method): handle for method in endpoint.methods
                    }
        self._api: ASGIApp | None = None
        self._making = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        handle = None
        if scope["type"] == "http":
            handle = self._handles.get((scope["path"], scope["method"]))
        if handle is None:
            api = self._api or await call_in_thread(self._fallback)
            await api(scope, receive, send)
            return
        scope["app"] = self
        response = await handle(QuickRequest(scope, receive, send))
        await response(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Describe the API."""
        return describe(tuple(endpoint for endpoint, _ in self._routes))

    def _fallback(self) -> ASGIApp:
        from sylvan.runtime.server.fallback import fallback_app

        with self._making:
            if self._api is None:
                self._api = fallback_app(self._routes, self._root_path, self.openapi)
            return self._api
