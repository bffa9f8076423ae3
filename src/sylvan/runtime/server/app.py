"""The HTTP application: a table of routes, and the middleware around them."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from sylvan.runtime.server.access_log import AccessLog
from sylvan.runtime.server.browsers import HostCheck, checked_hosts
from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.context import Context, make_context
from sylvan.runtime.server.dispatch import PathDispatcher
from sylvan.runtime.server.endpoint import serve
from sylvan.runtime.server.internal import InternalCaller
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.routes.platform_paths import with_other_paths
from sylvan.runtime.server.security import Gate
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.server.tickets import Tickets
from sylvan.runtime.tokenizer.manager import TokenizerManager


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
    gate = Gate(context.current, context.keyring)
    table = with_other_paths(ENDPOINTS)
    routes = [(endpoint, serve(endpoint, context, gate)) for endpoint in table]
    with contextlib.suppress(RuntimeError):  # no event loop runs
        context.accounts.watch(asyncio.get_running_loop())
    context.batches.worker.begin(InternalCaller(context, gate, ENDPOINTS))
    app: ASGIApp = PathDispatcher(routes, settings.server.root_path)
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
