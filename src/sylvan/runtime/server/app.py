"""The HTTP application: a table of routes, and the middleware around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sylvan.api.errors import Family, error_body
from sylvan.api.version import VERSION
from sylvan.runtime.server.access_log import AccessLog
from sylvan.runtime.server.browsers import HostCheck, checked_hosts
from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.context import Context, make_context
from sylvan.runtime.server.endpoint import INTERNAL_ERROR, Handle, json_response, serve
from sylvan.runtime.server.headers import QuickRequest
from sylvan.runtime.server.internal import InternalCaller
from sylvan.runtime.server.openapi import describe
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.routes.platform_paths import with_other_paths
from sylvan.runtime.server.security import Gate
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.server.tickets import Tickets
from sylvan.runtime.tokenizer.manager import TokenizerManager

_FAMILIES = (
    ("/v1/messages", Family.ANTHROPIC),
    ("/v1/responses", Family.RESPONSES),
    ("/v1/", Family.OPENAI),
    ("/api/", Family.OLLAMA),
)


def create_app(
    engine: TokenizerManager, settings: ServerSettings, connections: Connections | None = None
) -> ASGIApp:
    """Build the application that serves `engine`; it neither starts nor stops the engine.

    Resumes batches of an earlier run at once, which needs a running event loop. Metrics include
    `connections`, if given.

    Raises:
        ConfigError: A setting names something unknown, or a variable holds no valid path.
    """
    context = make_context(engine, settings)
    if connections is not None:
        context.accounts.show_connections(connections)
    return app_of(context)


def app_of(context: Context) -> ASGIApp:
    """Build the application from existing parts."""
    settings = context.settings
    api = FastAPI(
        title="Sylvan",
        version=VERSION,
        root_path=settings.server.root_path,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    table = with_other_paths(ENDPOINTS)
    api.openapi = lambda: describe(table)  # type: ignore[method-assign]
    gate = Gate(context.current, context.keyring)
    direct: dict[tuple[str, str], Handle] = {}
    for endpoint in table:
        handle = serve(endpoint, context, gate)
        api.add_route(endpoint.path, handle, methods=list(endpoint.methods))
        if "{" not in endpoint.path:
            direct.update({(endpoint.path, method): handle for method in endpoint.methods})
    api.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    api.add_exception_handler(Exception, _crash)
    with contextlib.suppress(RuntimeError):  # no event loop runs
        context.accounts.watch(asyncio.get_running_loop())
    context.batches.worker.begin(InternalCaller(context, gate, ENDPOINTS))
    app: ASGIApp = api if settings.server.root_path else Direct(api, direct)
    if settings.server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app = HostCheck(app, checked_hosts(settings))
    if settings.server.access_log:
        app = AccessLog(app, context.clock, settings.observe.access_log_exclude)
    return Tickets(app, context.current, gate, context.engine.ready)


class Direct:
    """Dispatches exact paths directly to their handlers; FastAPI matches the others.

    FastAPI's layers take a fifth of the time of a short call, and only find the handler here:
    handlers answer errors themselves.
    """

    def __init__(self, api: FastAPI, handles: Mapping[tuple[str, str], Handle]) -> None:
        self._api, self._handles = api, handles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as ASGI application."""
        handle = None
        if scope["type"] == "http":
            handle = self._handles.get((scope["path"], scope["method"]))
        if handle is None:
            await self._api(scope, receive, send)
            return
        scope["app"] = self._api
        response = await handle(QuickRequest(scope, receive, send))
        await response(scope, receive, send)


def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer an unknown path or method."""
    status = error.status_code
    kind = str(status) if _family(request.url.path) is Family.OPENAI else None
    message = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path[:200]}"
    content = error_body(_family(request.url.path), status, message, kind=kind)
    return json_response(content, status=status, headers=dict(error.headers or {}))


def _crash(request: Request, error: Exception) -> Response:
    """Answer an internal error; details go to the log only."""
    content: Any = error_body(_family(request.url.path), 500, INTERNAL_ERROR)
    return json_response(content, status=500)


def _family(path: str) -> Family:
    return next((family for prefix, family in _FAMILIES if path.startswith(prefix)), Family.NATIVE)
