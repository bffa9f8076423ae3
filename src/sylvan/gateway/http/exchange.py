"""Serves one request with as many workers as it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sylvan.config.route import FailoverConfig, RetryConfig, RouteLimitsConfig
from sylvan.gateway.errors import NoWorkerError, UpstreamError
from sylvan.gateway.flow.retry import Retries, RetryBudget
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.attempts import Attempts
from sylvan.gateway.http.caller import Caller, HeaderPairs
from sylvan.gateway.http.outgoing import AnswerJournal, new_ticket
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.http.relay import EventFilter, Relay, RetryableStatusError
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.http.sender import RequestSender
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.observe.metrics import GatewayMetrics
from sylvan.gateway.placement import PlacedRequest, RequestPlacer
from sylvan.gateway.policies.api import PlacementOutcome, RoutingRequest
from sylvan.gateway.workers.health import HealthChecks
from sylvan.gateway.workers.recovery import Recovery
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import Kind
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.journal import Totals
from sylvan.utils.clock import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeParts:
    """Dependencies of exchanges.

    Attributes:
        registry: All workers.
        placing: Selects workers.
        sender: Sends requests to them.
        health: Probes workers that look lost.
        recovery: Waits for workers that were lost.
        metrics: Prometheus metrics.
        budget: Retry budget of all requests.
        retry: When to retry.
        failover: When to move a stream to another worker.
        limits: Timeouts.
        clock: Monotonic clock, for durations.
        wall: Wall clock, in seconds since the Unix epoch.
        rng: Random source of the jitter.
    """

    registry: Registry
    placing: RequestPlacer
    sender: RequestSender
    health: HealthChecks
    recovery: Recovery
    metrics: GatewayMetrics
    budget: RetryBudget
    retry: RetryConfig
    failover: FailoverConfig
    limits: RouteLimitsConfig
    clock: Clock
    wall: Clock
    rng: random.Random = field(default_factory=random.Random)

    def attempts(self, endpoint: str) -> Attempts:
        """Make the attempts of a new request."""
        retries = Retries(self.retry, self.budget, self.rng)
        return Attempts(retries, self.metrics.worker, self.health, endpoint)

    def journal(self, caller: Caller) -> AnswerJournal:
        """Make the journal of a new request."""
        return AnswerJournal(new_ticket(caller, self.wall()), self.failover.journal_bytes)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A worker that holds what the request needs, or that the client chose (`strict`)."""

    worker: Worker
    strict: bool = False


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """An answer that another exchange started and this one continues.

    Attributes:
        kind: Kind of worker that can continue it.
        answer: The answer to the client.
        attempts: The attempts made so far.
        journal: How much of the answer the client has.
        edits: How the other exchange edits the stream.
    """

    kind: Kind
    answer: Answer
    attempts: Attempts
    journal: AnswerJournal
    edits: EventFilter | None = None


def routing_request(caller: Caller, parsed: ParsedBody) -> RoutingRequest:
    """Return what policies see of a request."""
    return RoutingRequest(
        prompt=parsed.prompt,
        namespace=f"{caller.tenant}/{parsed.namespace}",
        key=caller.headers.get("x-smg-routing-key", ""),
        token_ids=parsed.token_ids,
    )


async def give_up(
    answer: Answer, meter: RequestMeter, error: UpstreamError | NoWorkerError
) -> None:
    """Send the client an error, and count the failure in metrics."""
    meter.failed(error)
    if isinstance(error, RetryableStatusError) and not answer.started:
        await answer.refuse(error.refusal)
        return
    if answer.started:
        meter.cut()
    await answer.fail(error)


class Exchange:
    """Serves one request.

    Until the client has seen part of the answer, another attempt repeats the whole request. After
    that, another attempt continues the stream, which needs a journal.

    Args:
        begun: The answer so far, if another exchange started it.

    Attributes:
        totals: Token counts of the request, once it was served.
        workers: Workers of the last attempt.
    """

    def __init__(
        self,
        parts: ExchangeParts,
        caller: Caller,
        route: ProxyRoute,
        parsed: ParsedBody,
        meter: RequestMeter,
        *,
        begun: StartedAnswer | None = None,
    ) -> None:
        self._parts = parts
        self._begun = begun
        self._kind: Kind = "regular"
        self._caller = caller
        self._route = route
        self._parsed = parsed
        self._meter = meter
        self._headers: HeaderPairs = parts.sender.forwarding.headers(caller)
        if begun is None:
            self._answer = Answer(caller, route.family, parts.limits.slow_client_s)
            self._attempts = parts.attempts(route.path)
            self._journal = parts.journal(caller)
        else:
            self._answer = begun.answer
            self._attempts = begun.attempts
            self._journal = begun.journal
        self._losses = 0  # lost workers in a row without progress: the request may crash them
        self._routing_request = routing_request(caller, parsed)
        self.totals = Totals()
        self.workers: Sequence[Worker] = ()

    @property
    def tenant(self) -> str:
        """Tenant of the request."""
        return self._caller.tenant

    async def run(self, pinned: Pinned | None = None) -> None:
        """Serve the request, or send the client an error.

        Args:
            pinned: The worker to use.

        Raises:
            UnknownModelError: No worker serves the model.
            CallerGoneError: The client disconnected.
        """
        if self._begun is not None:
            self._kind = self._begun.kind
            self._losses = 1
            self._meter.continued()
        else:
            self._kind = self._parts.registry.single_kind(self._parsed.model, "http")
        while True:
            try:
                await self._attempt(self._place(pinned))
            except UpstreamError as error:
                if not await self._should_retry(error):
                    await give_up(self._answer, self._meter, error)
                    return
            except NoWorkerError as error:
                if not await self._wait_for_worker():
                    await give_up(self._answer, self._meter, error)
                    return
            else:
                self._meter.done(self.totals)
                return

    async def time_out(self, seconds: float) -> None:
        """Answer that the request timed out."""
        message = f"The request took longer than {seconds:g} s."
        await give_up(self._answer, self._meter, UpstreamError(message, kind="timeout", status=504))

    def _place(self, pinned: Pinned | None) -> PlacedRequest:
        placing, parsed = self._parts.placing, self._parsed
        if pinned is not None:
            if pinned.worker.available:
                return placing.pin(pinned.worker, self._routing_request)
            if pinned.strict:
                raise NoWorkerError(f"The worker {pinned.worker.id} is not available.")
        return placing.place(
            parsed.model,
            self._routing_request,
            kind=self._kind,
            connection="http",
            avoid=self._attempts.avoid,
            continuing=self._journal.begun,
        )

    async def _attempt(self, placed: PlacedRequest) -> None:
        worker = placed.worker
        self.workers = (worker,)
        self._caller.span.event("dispatch", {"worker": worker.url})
        dispatch = worker.begin(placed.placement.new_tokens)
        relay = Relay(self._answer, dispatch, self._meter)
        relay.edits = self._begun.edits if self._begun is not None else None
        success = False
        try:
            await self._send(worker, relay)
            dispatch.succeeded()
            success = True
        except UpstreamError as error:
            if relay.progressed:
                self._losses = 0
            self._caller.span.event("failure", {"worker": worker.url, "kind": error.kind})
            self._losses += error.kind in ("closed", "stall")
            self._attempts.blame(worker, dispatch, error)
            raise
        finally:
            dispatch.close()
            self.totals = relay.totals
            outcome = PlacementOutcome(
                success=success,
                prompt_tokens=self.totals.prompt_tokens,
                cached_tokens=self.totals.cached_tokens,
            )
            placed.completed(outcome)

    async def _send(self, worker: Worker, relay: Relay) -> None:
        sender = self._parts.sender
        request = sender.outgoing(self._caller, self._headers, worker, self._parsed.raw)
        elapsed_s = self._meter.elapsed_s if self._losses or self._journal.begun else 0.0
        await sender.send(request, worker, self._journal, relay, elapsed_s)

    async def _should_retry(self, error: UpstreamError) -> bool:
        """Whether to make another attempt; returns after the pause before it."""
        parts = self._parts
        if self._losses > parts.failover.max_moves:
            return False
        if self._answer.started:
            if not self._journal.begun or self._journal.full:
                return False
            self._meter.continued()
            return True
        return await self._attempts.should_retry(self._kind)

    async def _wait_for_worker(self) -> bool:
        """Wait for a worker that can serve the request or continue it; whether one appeared."""
        recovery, model = self._parts.recovery, self._parsed.model
        if not self._answer.started:
            return await recovery.for_request(model, self._kind, "http")
        if self._journal.full:
            return False
        return await recovery.for_stream(model, self._kind, "http")
