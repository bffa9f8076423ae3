"""The HTTP router: parses a request, admits it, and has it served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import orjson

from sylvan.config.route import RouteLimitsConfig
from sylvan.gateway.errors import (
    QueueFullError,
    QueueTimeoutError,
    UnauthorizedError,
    UpstreamError,
)
from sylvan.gateway.flow.admission import GatewayAdmission, Permit
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.exchange import Exchange, ExchangeParts, Pinned
from sylvan.gateway.http.fanout import FanOut, servers
from sylvan.gateway.http.inflight import Inflight
from sylvan.gateway.http.outgoing import TARGET_WORKER
from sylvan.gateway.http.pairs.exchange import PairExchange, needs_one_worker
from sylvan.gateway.http.parsed_body import ParsedBody, nothing, read, read_form
from sylvan.gateway.http.resumable import ResumableRequests
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.http.search import ObjectLocator
from sylvan.gateway.observe.meter import ModelNames, RequestMeter, RouteLabels
from sylvan.gateway.security.clients import Clients
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.journal import Totals


class GrpcServing(Protocol):
    """Serves requests with workers that speak gRPC."""

    async def serve(
        self, caller: Caller, route: ProxyRoute, parsed: ParsedBody, meter: RequestMeter
    ) -> Totals:
        """Serve one request, or send the client an error; return its token count."""
        ...


class PromptTokenizer(Protocol):
    """Returns token IDs of prompts that are given as text."""

    async def of(self, path: str, parsed: ParsedBody) -> Sequence[int] | None:
        """Return the token IDs of a request's prompt; None if unknown."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterParts:
    """Dependencies of the router.

    Attributes:
        exchange: Dependencies of requests to one worker.
        admission: Admits requests.
        clients: Tenants' budgets.
        limits: Timeouts.
        max_body_bytes: Limit of bodies.
        has_peers: The gateway has other processes.
        grpc: Serves requests with gRPC workers; None if gRPC is not installed.
        prompts: Tokenises prompts for policies that use token IDs; None: lengths are estimated.
    """

    exchange: ExchangeParts
    admission: GatewayAdmission
    clients: Clients
    limits: RouteLimitsConfig
    max_body_bytes: int
    has_peers: bool = False
    grpc: GrpcServing | None = None
    prompts: PromptTokenizer | None = None


class HttpRouter:
    """Serves the routes that are forwarded to workers over HTTP."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._fanout = FanOut(parts.exchange)
        self._search = ObjectLocator(parts.exchange)
        self._inflight = Inflight()
        self._models = ModelNames()
        self._following = ResumableRequests(parts.exchange.failover)

    async def serve(self, caller: Caller, route: ProxyRoute, *, operator: bool) -> None:
        """Serve one request.

        Args:
            caller: The client.
            route: The requested route.
            operator: Whether the caller is an operator.

        Raises:
            RequestError: The request cannot be served.
            CapacityError: The request cannot be served now.
            CallerGoneError: The client disconnected.
        """
        raw = await caller.body(self._parts.max_body_bytes)
        if route.path == "/abort_request":
            await self._abort(caller, route, raw, operator=operator)
        elif route.spread == "all":
            await caller.until_gone(self._fanout.serve(caller, route, raw))
        elif route.spread != "one":
            await caller.until_gone(self._search.serve(caller, route, raw))
        else:
            assert route.prompt_of is not None, "a route to one worker has a parser for its body"
            if await self._following.resume(caller):
                return
            if route.form:
                parsed = read_form(raw, caller.headers.get("content-type", ""))
            else:
                parsed = read(raw, route.prompt_of, streams_by_default=route.streams)
            resumable = parsed.stream and not self._parts.has_peers
            if resumable and self._following.wanted(caller):
                await self._following.serve(caller, lambda c: self._answered(c, route, parsed))
            else:
                await caller.until_gone(self._serve_one(caller, route, parsed))

    async def close(self) -> None:
        """Abort requests that run without a client."""
        await self._following.close()

    async def _answered(self, caller: Caller, route: ProxyRoute, parsed: ParsedBody) -> None:
        """Serve a request; errors are answers too."""
        try:
            await self._serve_one(caller, route, parsed)
        except SylvanError as error:
            if caller.started:
                raise
            await caller.reply_error(route.family, error)

    async def _serve_one(self, caller: Caller, route: ProxyRoute, parsed: ParsedBody) -> None:
        parts = self._parts
        parts.clients.admit(caller.tenant)
        if parts.grpc is not None and self._only_grpc(parsed):
            await self._serve_grpc(parts.grpc, caller, route, parsed)
            return
        if parts.prompts is not None and parsed.token_ids is None:
            ids = await parts.prompts.of(route.path, parsed)
            parsed = replace(parsed, token_ids=ids)
        registry = parts.exchange.registry
        apart = route.pairs and registry.paired(parsed.model, "http")
        paired = apart and not needs_one_worker(parsed)
        permit = await self._enter(caller.tenant)
        meter = self._meter(route, parsed, backend="pd" if paired else "regular")
        serving = PairExchange if paired else Exchange
        exchange = serving(parts.exchange, caller, route, parsed, meter)
        limit_s = parts.limits.request_timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            with self._inflight.named(parsed.rid, exchange):
                async with deadline:
                    await exchange.run(await self._pinned(caller, parsed))
        except TimeoutError:
            if not deadline.expired():
                raise
            await exchange.time_out(limit_s)
        finally:
            permit.close()
            totals = exchange.totals
            parts.clients.charge(caller.tenant, totals.prompt_tokens + totals.completion_tokens)

    async def _serve_grpc(
        self, grpc: GrpcServing, caller: Caller, route: ProxyRoute, parsed: ParsedBody
    ) -> None:
        parts, totals = self._parts, Totals()
        permit = await self._enter(caller.tenant)
        limit_s = parts.limits.request_timeout_s
        deadline = asyncio.timeout(limit_s)
        paired = parts.exchange.registry.paired(parsed.model, "grpc")
        meter = self._meter(route, parsed, "grpc", "pd" if paired else "regular")
        try:
            async with deadline:
                totals = await grpc.serve(caller, route, parsed, meter)
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"The request took longer than {limit_s:g} s."
            error = UpstreamError(message, kind="timeout", status=504)
            await Answer(caller, route.family, parts.limits.slow_client_s).fail(error)
        finally:
            permit.close()
            parts.clients.charge(caller.tenant, totals.prompt_tokens + totals.completion_tokens)

    def _only_grpc(self, parsed: ParsedBody) -> bool:
        """Whether only gRPC workers serve the model."""
        registry = self._parts.exchange.registry
        return registry.speaks(parsed.model, "grpc") and not registry.speaks(parsed.model, "http")

    async def _enter(self, tenant: str) -> Permit:
        outcomes = self._parts.exchange.metrics.http.rate_limit
        try:
            permit = await self._parts.admission.enter(tenant)
        except QueueFullError:
            outcomes.labels("rejected").inc()
            raise
        except QueueTimeoutError:
            outcomes.labels("timed_out").inc()
            raise
        outcomes.labels("allowed").inc()
        return permit

    def _meter(
        self,
        route: ProxyRoute,
        parsed: ParsedBody,
        connection: str = "http",
        backend: str = "regular",
    ) -> RequestMeter:
        exchange = self._parts.exchange
        served = exchange.registry.models
        model = served[0] if len(served) == 1 else parsed.model
        labels = RouteLabels(connection, backend, connection, self._models.label(model), route.path)
        return RequestMeter(exchange.metrics, labels, exchange.clock, stream=parsed.stream)

    async def _pinned(self, caller: Caller, parsed: ParsedBody) -> Pinned | None:
        """The worker that this request must use, if any."""
        target = caller.headers.get(TARGET_WORKER)
        if target:
            registry = self._parts.exchange.registry
            worker = registry.get(target) or registry.by_url(target)
            if worker is None:
                message = f"{TARGET_WORKER}: there is no worker {target[:200]!r}."
                raise RequestError(message, param=TARGET_WORKER)
            return Pinned(worker, strict=True)
        session = parsed.fields.get("session_params")
        if isinstance(session, dict) and session:
            return Pinned(self._search.keeper(caller.tenant))
        conversation = parsed.fields.get("conversation")
        if isinstance(conversation, dict):
            conversation = cast("dict[str, Any]", conversation).get("id")
        earlier = parsed.fields.get("previous_response_id")
        for kind, name in (("conversations", conversation), ("responses", earlier)):
            if isinstance(name, str) and name.isascii() and name.replace("_", "").isalnum():
                found = await self._search.find(caller, f"/v1/{kind}/{name}")
                return Pinned(found) if found is not None else None
        return None

    async def _abort(
        self, caller: Caller, route: ProxyRoute, raw: bytes, *, operator: bool
    ) -> None:
        """Abort requests where they run: all of them for an operator, else the tenant's own."""
        parsed = read(raw, nothing)
        fields: dict[str, Any] = dict(parsed.fields)
        if fields.get("abort_all") is True:
            if not operator:
                raise UnauthorizedError("Forbidden: abort_all is for operators.", status=403)
            await self._fanout.serve(caller, route, raw)
            return
        running = self._inflight.find(parsed.rid or "", caller.tenant)
        workers = {worker.id: worker for r in running for worker in r.workers}
        if not workers and not caller.tenant:
            await self._fanout.serve(caller, route, raw)
            return
        if not workers and self._parts.has_peers:  # they know their tenants
            able = servers(self._parts.exchange.registry.workers)
            workers = {worker.id: worker for worker in able if worker.found.journals}
        body_bytes = orjson.dumps({"rid": parsed.rid})
        for worker in workers.values():
            await self._search.send(caller, "/abort_request", worker, body_bytes)
        await caller.reply(200, [], b"")
