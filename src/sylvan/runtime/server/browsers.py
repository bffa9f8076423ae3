"""Distinguishes calls of web pages from those of programs, by Host, Origin and fetch metadata.

A server without a key trusts every client that can reach it. So can a browser on the same machine,
which runs pages of any site. Such a page reaches the server through a host name of its own (DNS
rebinding), as a cross-origin request, or by a link or image, which sends neither.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sylvan.runtime.server.settings import ServerSettings
from sylvan.utils.origins import host_of, is_loopback, is_own

ANY = "*"
_SAFE_SITES = ("same-origin", "none")


class HostCheck:
    """Rejects calls with a malformed Host header or, where pages could call, a foreign host.

    Args:
        app: The wrapped application.
        allowed: Allowed names and addresses besides loopback; None checks the syntax
            only.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] | None) -> None:
        self._app = app
        self._allowed = None if allowed is None else {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        if scope["type"] == "http" and (why := self._refusal(scope)) is not None:
            status, message = why
            await PlainTextResponse(message + "\n", status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if not given:  # browsers always send it
            return None
        name = host_of(given[0].decode("latin-1")) if len(given) == 1 else None
        if name is None:
            return 400, "The Host header is malformed."
        if self._allowed is None or name in self._allowed or is_loopback(name):
            return None
        return 403, f"This server is not called {name[:80]} (server.allowed_hosts)."


def checked_hosts(settings: ServerSettings) -> Collection[str] | None:
    """Return the hosts that `HostCheck` allows; None if any host is allowed.

    Names are checked if they are configured, and on a server that listens on loopback only and
    requires no key.
    """
    if ANY in settings.allowed_hosts:
        return None
    return settings.allowed_hosts if settings.allowed_hosts or settings.trusting else None


def is_cross_origin(headers: Headers, origins: Collection[str]) -> bool:
    """Whether a page of another origin makes this call, according to the browser's headers.

    Args:
        headers: Headers of the call.
        origins: Allowed origins, such as `https://chat.example`.
    """
    origin = headers.get("origin")
    if origin is not None:
        return origin not in origins and not is_own(origin, headers.get("host", ""))
    return headers.get("sec-fetch-site", "none") not in _SAFE_SITES
