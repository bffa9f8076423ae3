"""The ASGI application: matches the route, authenticates the caller, and formats errors."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Receive, Scope, Send

from sylvan.api.errors import Family
from sylvan.gateway.control.api import OwnRoute
from sylvan.gateway.control.gauges import InflightAges
from sylvan.gateway.errors import UnauthorizedError
from sylvan.gateway.http.caller import Caller, CallerGoneError
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.observe.metrics import HttpMetrics
from sylvan.gateway.observe.spans import NoTracing, Tracing
from sylvan.gateway.security.gate import GatewayAuth
from sylvan.gateway.table import Route, RouteMatch, RouteTable
from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.utils.body_memory import BodyMemory
from sylvan.utils.clock import Clock

access = logging.getLogger("sylvan.access")

CLIENT_GONE = 499  # never sent; logged as the status when the client disconnected
MAX_ID_CHARS = 256
_PREFIXES = (
    ("/v1/messages", Family.ANTHROPIC),
    ("/v1/responses", Family.RESPONSES),
    ("/v1/", Family.OPENAI),
    ("/api/", Family.OLLAMA),
)


class Serving(Protocol):
    """Serves requests that are forwarded to workers."""

    async def serve(self, caller: Caller, route: ProxyRoute, *, operator: bool) -> None:
        """Serve one request; see `HttpRouter.serve`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AppParts:
    """Dependencies of the application.

    Attributes:
        table: All routes.
        gate: Checks credentials.
        router: Forwards requests to workers.
        metrics: Prometheus metrics.
        ages: Ages of in-flight requests.
        clock: Monotonic clock, for durations.
        id_headers: Headers that may carry a request ID.
        body_memory: Memory budget of request bodies.
        tracing: Traces forwarded requests.
        access_log: Log one line per call.
        audit: Log administrative calls.
    """

    table: RouteTable
    gate: GatewayAuth
    router: Serving
    metrics: HttpMetrics
    ages: InflightAges
    clock: Clock
    id_headers: Sequence[str]
    body_memory: BodyMemory
    tracing: Tracing = field(default_factory=NoTracing)
    access_log: bool = False
    audit: bool = False


class Gateway:
    """The ASGI application.

    Attributes:
        num_inside: Calls in flight.
    """

    def __init__(self, parts: AppParts) -> None:
        self._parts = parts
        self.num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] != "http":
            return
        parts = self._parts
        caller = Caller(scope, receive, send, parts.body_memory)
        began = parts.clock()
        self.num_inside += 1
        parts.metrics.connections.inc()
        parts.ages.enter(caller)
        shown = "unknown"
        try:
            found = self._find(caller)
            shown = found.route.path
            caller.request_id = self._request_id(caller, found.route)
            if isinstance(found.route, ProxyRoute):
                caller.span = parts.tracing.begin(f"{caller.method} {shown}", caller.headers)
            await self._serve(caller, found)
        except CallerGoneError:
            caller.gone = True
        except SylvanError as error:
            if caller.started:
                raise
            await caller.reply_error(_family(caller.path), error)
        finally:
            self.num_inside -= 1
            parts.body_memory.give_back(caller.held)
            parts.metrics.connections.dec()
            parts.ages.leave(caller)
            self._count(caller, shown, parts.clock() - began)
            status = CLIENT_GONE if caller.gone else caller.status
            facts = {"http.route": shown, "sylvan.request_id": caller.request_id}
            caller.span.end(status, facts)

    def _find(self, caller: Caller) -> RouteMatch:
        found = self._parts.table.find(caller.path, caller.method)
        if found is None:
            message = f"Not Found: {caller.method} {caller.path[:200]}"
            raise RequestError(message, status=404)
        if isinstance(found, frozenset):
            message = f"{caller.path[:200]} is for {', '.join(sorted(found))}."
            raise RequestError(message, status=405)
        return found

    async def _serve(self, caller: Caller, found: RouteMatch) -> None:
        route, gate = found.route, self._parts.gate
        if isinstance(route, OwnRoute):
            await self._admit(caller, route)
            await route.handler(caller, found.params)
            return
        operator = False
        if route.operator:
            await self._operator(caller)
            operator = True
        else:
            caller.tenant = (await gate.client(caller.headers)).tenant
            operator = route.path == "/abort_request" and await self._may_operate(caller)
        await self._parts.router.serve(caller, route, operator=operator)

    async def _admit(self, caller: Caller, route: OwnRoute) -> None:
        if route.level == "client":
            caller.tenant = (await self._parts.gate.client(caller.headers)).tenant
        elif route.level == "operator":
            await self._operator(caller)

    async def _operator(self, caller: Caller) -> None:
        outcome, name = "denied", "unknown"
        try:
            name = (await self._parts.gate.operator(caller.headers)).name
            outcome = "allowed"
        finally:
            if self._parts.audit:
                access.info("audit %s %s %s %s", name, outcome, caller.method, _plain(caller.path))

    async def _may_operate(self, caller: Caller) -> bool:
        try:
            await self._parts.gate.operator(caller.headers)
        except (UnauthorizedError, CapacityError):
            return False
        return True

    def _request_id(self, caller: Caller, route: Route) -> str:
        for name in self._parts.id_headers:
            given = caller.headers.get(name, "")
            if given and len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
                return given
        prefix = route.prefix if isinstance(route, ProxyRoute) else "req-"
        return prefix + secrets.token_hex(12)

    def _count(self, caller: Caller, shown: str, seconds: float) -> None:
        metrics = self._parts.metrics
        status = CLIENT_GONE if caller.gone else caller.status
        metrics.requests.labels(caller.method[:16], shown).inc()
        metrics.duration.labels(caller.method[:16], shown).observe(seconds)
        metrics.responses.labels(str(status), _error_code(status)).inc()
        if self._parts.access_log:
            access.info(
                "%s %s %d %.1f ms %s",
                caller.method[:16],
                _plain(caller.path),
                status,
                seconds * 1000,
                caller.request_id,
            )


def _family(path: str) -> Family:
    return next((f for prefix, f in _PREFIXES if path.startswith(prefix)), Family.NATIVE)


def _error_code(status: int) -> str:
    return "" if status < 400 else "client_error" if status < 500 else "server_error"


def _plain(path: str) -> str:
    return path.encode("unicode_escape").decode("ascii")[:200]
