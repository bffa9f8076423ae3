"""Runs gateways and workers on loopback ports, on the test's event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from sylvan.cli.http import HttpServer
from sylvan.cli.listen import listen
from sylvan.cli.route import connection_limits
from sylvan.config.fields import replaced
from sylvan.config.live import LiveSettings
from sylvan.config.route import (
    FrontConfig,
    HealthConfig,
    RetryConfig,
    RouteConfig,
    RouteLimitsConfig,
    WorkersConfig,
)
from sylvan.config.schema import ROUTE
from sylvan.gateway.build import Clocks, GatewayRuntime, PeerIdentity
from sylvan.gateway.live import LIVE
from sylvan.runtime.server.app import app_of
from sylvan.runtime.server.connections import Connections
from sylvan.runtime.server.context import make_context
from sylvan.text.tokenizer import Tokenizer
from tests.support.scripted import Behaviour, ScriptedEngine, make_engine
from tests.support.settings import settings_of

T = TypeVar("T")

QUICK = RouteConfig(
    workers=WorkersConfig(startup_interval_s=0.05, startup_timeout_s=30.0),
    health=HealthConfig(interval_s=0.1, timeout_s=2.0, failures=1, successes=1),
    retry=RetryConfig(initial_backoff_ms=1.0, max_backoff_ms=5.0),
)
"""A gateway that notices everything soon."""


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application on a free port; yield its address."""
    sock = listen("127.0.0.1", 0, ("host", "port"), "--port")
    connections = Connections(connection_limits(RouteLimitsConfig()))
    async with HttpServer(app, FrontConfig(), sock, connections) as http:
        yield f"http://127.0.0.1:{http.port}"


@dataclass
class ScriptedWorker:
    """The HTTP server of a worker over a scripted engine."""

    url: str
    engine: ScriptedEngine
    calls: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget the calls, and restore the initial behaviour."""
        self.calls.clear()
        fresh, control = Behaviour(), self.engine.control
        for part in fields(Behaviour):
            setattr(control, part.name, getattr(fresh, part.name))

    def paths(self, path: str) -> list[dict[str, str]]:
        """Return the headers of the calls of a path."""
        return [headers for _, called, headers in self.calls if called == path]


class Elsewhere:
    """An event loop in a thread, for servers that outlive the test's loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context there; `close` leaves it."""
        return self._there(self._stack.enter_async_context(context))

    def close(self) -> None:
        """Leave all contexts, and end the thread."""
        self._there(self._stack.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


@asynccontextmanager
async def scripted(folder: Path, **settings: Any) -> AsyncIterator[ScriptedWorker]:
    """Start a worker that answers by a script."""
    engine = make_engine(folder, Tokenizer.load(folder))
    settings.setdefault("served_model_name", "scripted")
    inner = app_of(make_context(engine.manager, settings_of(**settings)))
    worker = ScriptedWorker("", engine)

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {k.decode(): v.decode() for k, v in scope["headers"]}
            worker.calls.append((scope["method"], scope["path"], headers))
        await inner(scope, receive, send)

    beating = asyncio.create_task(_beat(engine))
    try:
        async with served(noted) as url:
            worker.url = url
            yield worker
    finally:
        beating.cancel()
        engine.manager.close()


async def _beat(engine: ScriptedEngine) -> None:
    while True:
        engine.scheduler.beat()
        await asyncio.sleep(0.2)


@dataclass
class RunningGateway:
    """A gateway behind a port."""

    url: str
    runtime: GatewayRuntime
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)

    async def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return await self.http.get(path, **kwargs)

    async def settled(self, count: int) -> None:
        """Wait until this many workers are healthy."""
        await self.runtime.jobs.wait_all()
        await until(lambda: sum(w.is_healthy for w in self.runtime.registry.workers) == count)

    def metric(self, name: str, **labels: str) -> float:
        return self.runtime.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def gateway(
    *urls: str,
    wait: int | None = None,
    base: RouteConfig = QUICK,
    peers: PeerIdentity | None = None,
    clocks: Clocks | None = None,
    sources: Callable[[], RouteConfig] | None = None,
    **changes: Any,
) -> AsyncIterator[RunningGateway]:
    """Run a gateway in front of workers.

    Args:
        urls: Addresses of the workers.
        wait: Number of workers to wait for; None: all.
        base: Settings.
        peers: The other processes of the gateway.
        clocks: Its clocks.
        sources: Sources for reloading its settings; None: they cannot change.
        changes: Changed settings, by path with `__` for the dot.
    """
    values = {"workers.urls": urls} | {k.replace("__", "."): v for k, v in changes.items()}
    config = replaced(base, values)
    async with AsyncExitStack() as stack:
        live = sources and LiveSettings(ROUTE, config, LIVE, sources, lambda: 0.0)
        made_of = GatewayRuntime(config, clocks, peers, live)
        runtime = await stack.enter_async_context(made_of)
        url = await stack.enter_async_context(served(runtime.app))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=60, verify=False)
        )
        made = RunningGateway(url, runtime, http)
        wanted = len(urls) if wait is None else wait
        if wanted:
            await made.settled(wanted)
        yield made


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def events(text: str) -> list[Any]:
    """Return the data of server-sent events."""
    found = []
    for block in text.strip().split("\n\n"):
        data = next(line[6:] for line in block.split("\n") if line.startswith("data: "))
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


RawAnswer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw(answer: RawAnswer) -> AsyncIterator[str]:
    """Run a server that handles connections with a given function."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
