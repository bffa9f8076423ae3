"""Forwards requests to the server that has the model, or to a fallback."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import orjson

from sylvan.api.errors import Family
from sylvan.api.multipart import with_field
from sylvan.config.route import RouteLimitsConfig
from sylvan.gateway.control.api import TEXT, OwnRoute, Params
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.flow.admission import GatewayAdmission
from sylvan.gateway.flow.retry import RETRYABLE
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.caller import Caller, Refusal, end_to_end
from sylvan.gateway.http.outgoing import OWN_HEADERS
from sylvan.gateway.http.parsed_body import ParsedBody, nothing, read, read_form
from sylvan.gateway.http.relay import RetryableStatusError
from sylvan.gateway.http.routes import AUDIO, ProxyRoute
from sylvan.gateway.observe.meter import ModelNames, RequestMeter, RouteLabels
from sylvan.gateway.observe.metrics import GatewayMetrics
from sylvan.gateway.openai.catalog import Catalog, CatalogTarget
from sylvan.gateway.openai.history.answer import StoredAnswer
from sylvan.gateway.openai.history.history import History
from sylvan.gateway.openai.history.turn import StoredTurn
from sylvan.gateway.security.clients import Clients
from sylvan.gateway.upstream.http import HttpUpstream, Incoming, Outgoing
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

MAX_REFUSAL_BYTES = 1 << 20
_DROPPED = ("host", "content-length", "expect", "x-request-id", "authorization", "x-api-key")
_PATHS: Mapping[str, Family] = {
    "/v1/chat/completions": Family.OPENAI,
    "/v1/completions": Family.OPENAI,
    "/v1/embeddings": Family.OPENAI,
    "/v1/responses": Family.RESPONSES,
}
ROUTES = (
    *(
        ProxyRoute(path=path, family=family, prompt_of=nothing, prefix="req-")
        for path, family in _PATHS.items()
    ),
    *AUDIO,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassThroughParts:
    """Dependencies of the router.

    Attributes:
        catalog: Maps models to servers.
        upstream: HTTP client.
        admission: Admits requests.
        clients: Tenants' budgets.
        keeps_credentials: Forward clients' keys to servers that have none configured.
        metrics: Prometheus metrics.
        limits: Timeouts.
        max_body_bytes: Limit of bodies.
        clock: Monotonic clock, for durations.
        history: Stores responses and conversations; None: upstreams store their own.
    """

    catalog: Catalog
    upstream: HttpUpstream
    admission: GatewayAdmission
    clients: Clients
    keeps_credentials: bool
    metrics: GatewayMetrics
    limits: RouteLimitsConfig
    max_body_bytes: int
    clock: Clock
    history: History | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """One request, and the servers to try.

    Attributes:
        turn: What is stored with its response; None: nothing is stored.
    """

    caller: Caller
    route: ProxyRoute
    parsed: ParsedBody
    targets: Sequence[CatalogTarget]
    turn: StoredTurn | None = None


class PassThrough:
    """Serves the routes of the OpenAI API through other servers of that API.

    Answers are relayed unchanged. Until the client has the first byte, the next server is tried if
    one is unreachable, overloaded or failing.
    """

    def __init__(self, parts: PassThroughParts) -> None:
        self._parts = parts
        self._models = ModelNames()

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes answered here."""
        ready = ("/readiness", "/ready")
        live = ("/liveness", "/live", "/health")
        return (
            OwnRoute(path="/v1/models", handler=self.models, family=Family.OPENAI),
            *(OwnRoute(path=path, handler=self.live, level="open") for path in live),
            *(OwnRoute(path=path, handler=self.ready, level="open") for path in ready),
            *(() if self._parts.history is None else self._parts.history.routes),
        )

    async def models(self, caller: Caller, params: Params) -> None:
        """List all models, without duplicates."""
        cards = [{"id": name, "object": "model"} for name in self._parts.catalog.models]
        await caller.reply_json({"object": "list", "data": cards})

    async def live(self, caller: Caller, params: Params) -> None:
        """Answer 200 while the event loop runs."""
        await caller.reply(200, TEXT, b"OK")

    async def ready(self, caller: Caller, params: Params) -> None:
        """Answer 200 once a model is known."""
        known = len(self._parts.catalog.models)
        status = "ready" if known else "not ready"
        await caller.reply_json({"status": status, "models": known}, 200 if known else 503)

    async def serve(self, caller: Caller, route: ProxyRoute, *, operator: bool) -> None:
        """Serve one request.

        Raises:
            RequestError: The request cannot be served.
            CapacityError: The request cannot be served now.
            CallerGoneError: The client disconnected.
        """
        parts = self._parts
        raw = await caller.body(parts.max_body_bytes)
        if route.form:
            parsed = read_form(raw, caller.headers.get("content-type", ""))
        else:
            parsed = read(raw, nothing)
        if parsed.model is None:
            raise RequestError("model must be given.", param="model")
        targets = parts.catalog.targets(parsed.model)
        parts.clients.admit(caller.tenant)
        work = _Work(caller, route, parsed, targets)
        history = parts.history
        if history is None or route.family is not Family.RESPONSES:
            await caller.until_gone(self._admitted(work))
            return
        turn = await history.begin(caller, parsed)
        work = replace(work, parsed=turn.parsed, turn=turn)
        if turn.background is None:
            await caller.until_gone(self._admitted(work))
            return
        begun = await history.background.start(
            caller, turn, lambda unseen: self._admitted(replace(work, caller=unseen))
        )
        await caller.reply_json(begun)

    async def _admitted(self, work: _Work) -> None:
        permit = await self._parts.admission.enter(work.caller.tenant)
        try:
            await self._serve(work)
        finally:
            permit.close()

    async def _serve(self, work: _Work) -> None:
        limits = self._parts.limits
        caller, route, parsed = work.caller, work.route, work.parsed
        plain = Answer(caller, route.family, limits.slow_client_s)
        answer = plain if work.turn is None else StoredAnswer(work.turn, plain)
        labels = RouteLabels(
            "openai", "external", "http", self._models.label(parsed.model), route.path
        )
        meter = RequestMeter(self._parts.metrics, labels, self._parts.clock, stream=parsed.stream)
        failure: UpstreamError | None = None
        deadline = asyncio.timeout(limits.request_timeout_s)
        try:
            async with deadline:
                for target in work.targets:
                    try:
                        request = self._request(work, target)
                        await self._send(request, answer, meter)
                    except UpstreamError as error:
                        failure = error
                        if answer.started:
                            break
                    else:
                        meter.done(answer.totals())
                        return
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"The request took longer than {limits.request_timeout_s:g} s."
            failure = UpstreamError(message, kind="timeout", status=504)
        assert failure is not None, "there is a target"
        meter.failed(failure)
        if isinstance(failure, RetryableStatusError) and not answer.started:
            await plain.refuse(failure.refusal)
        else:
            await plain.fail(failure)

    async def _send(
        self, request: Outgoing, answer: Answer | StoredAnswer, meter: RequestMeter
    ) -> None:
        async with self._parts.upstream.send(request) as incoming:
            meter.answered(incoming.status)
            if incoming.status in RETRYABLE:
                raise RetryableStatusError(await _refusal(incoming))
            await answer.head(incoming.status, incoming.headers)
            async for chunk in incoming.chunks():
                meter.first_byte()
                await answer.data(chunk)
        await answer.end()

    def _request(self, work: _Work, target: CatalogTarget) -> Outgoing:
        caller, route, parsed = work.caller, work.route, work.parsed
        dropped = {*OWN_HEADERS, *_DROPPED}
        if work.turn is not None:
            dropped.add("accept-encoding")  # a response to be stored must be readable
        key = target.upstream.api_key
        given = caller.headers.get("authorization")
        headers = end_to_end(caller.raw_headers, dropped)
        if key is not None:
            headers.append(("authorization", f"Bearer {key}"))
        elif given and self._parts.keeps_credentials:
            headers.append(("authorization", given))
        headers.append(("x-request-id", caller.request_id))
        body = parsed.raw
        if target.model != parsed.model and route.form:
            body = with_field(caller.headers["content-type"], body, "model", target.model)
        elif target.model != parsed.model:
            body = orjson.dumps({**parsed.fields, "model": target.model})
        return Outgoing(
            method="POST",
            url=target.upstream.url,
            target=route.path.removeprefix("/v1"),
            headers=headers,
            body=body,
        )


async def _refusal(incoming: Incoming) -> Refusal:
    return Refusal(incoming.status, incoming.headers, await incoming.read(MAX_REFUSAL_BYTES))
