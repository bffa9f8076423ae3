"""Runs requests through the seven stages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sylvan.config.route import FailoverConfig, RetryConfig, RouteLimitsConfig
from sylvan.gateway.errors import NoWorkerError, UpstreamError
from sylvan.gateway.flow.retry import Retries, RetryBudget
from sylvan.gateway.grpc.context import EMBEDDINGS, PipelineStage, RequestContext, RequestInput
from sylvan.gateway.grpc.embeddings import GrpcEmbeddings
from sylvan.gateway.grpc.stages.client_acquisition import ClientAcquisition
from sylvan.gateway.grpc.stages.dispatch_metadata import DispatchMetadata
from sylvan.gateway.grpc.stages.preparation import Preparation
from sylvan.gateway.grpc.stages.request_building import RequestBuilding
from sylvan.gateway.grpc.stages.request_execution import RequestExecution
from sylvan.gateway.grpc.stages.response_processing import ResponseProcessing
from sylvan.gateway.grpc.stages.worker_selection import WorkerSelection
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.attempts import Attempts
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.observe.metrics import GatewayMetrics
from sylvan.gateway.placement import RequestPlacer
from sylvan.gateway.policies.api import PlacementOutcome
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.upstream.grpc import GrpcUpstream
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.gateway.workers.health import HealthChecks
from sylvan.gateway.workers.recovery import Recovery
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import Kind
from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import Totals
from sylvan.protocol.messages import Usage
from sylvan.utils.clock import Clock

_WORKERS_FAULT = ("connect", "closed", "stall", "protocol")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcParts:
    """Dependencies of the router.

    Attributes:
        registry: All workers.
        placing: Selects workers.
        library: Text processing of their models.
        upstream: Channels to them.
        probe: Knows the keys of workers.
        health: Probes workers that look lost.
        recovery: Waits for workers that were lost.
        metrics: Prometheus metrics.
        budget: Retry budget of all requests.
        retry: When to retry.
        failover: When to move a stream to another worker.
        limits: Timeouts of clients.
        clock: Monotonic clock, for durations.
        wall: Wall clock, in seconds since the Unix epoch.
        rng: Random source of the jitter.
    """

    registry: Registry
    placing: RequestPlacer
    library: TextLibrary
    upstream: GrpcUpstream
    probe: GrpcProbe
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


class GrpcRouter:
    """Serves requests with workers that speak gRPC.

    Preparation runs once; another attempt starts at worker selection. The router keeps what a
    worker has sent, and another worker continues from there if it can. Otherwise the request
    starts over, as long as the client has seen none of the answer.
    """

    def __init__(self, parts: GrpcParts) -> None:
        self._parts = parts
        self._preparation = Preparation(parts.registry, parts.library, parts.wall)
        self._embeddings = GrpcEmbeddings(
            parts.registry,
            parts.placing,
            parts.library,
            (parts.upstream, parts.probe),
            self._attempts,
            parts.limits.request_timeout_s,
        )
        self._attempt: Sequence[PipelineStage] = (
            WorkerSelection(parts.registry, parts.placing),
            ClientAcquisition(parts.upstream),
            RequestBuilding(),
            DispatchMetadata(parts.probe),
            RequestExecution(parts.probe, parts.failover.stall_s),
            ResponseProcessing(),
        )

    def _attempts(self, endpoint: str) -> Attempts:
        parts = self._parts
        retries = Retries(parts.retry, parts.budget, parts.rng)
        return Attempts(retries, parts.metrics.worker, parts.health, endpoint)

    async def serve(
        self, caller: Caller, route: ProxyRoute, parsed: ParsedBody, meter: RequestMeter
    ) -> Totals:
        """Serve one request, or send the client an error; return its token count.

        Raises:
            RequestError: The request cannot be served.
            CapacityError: The request cannot be served now.
            CallerGoneError: The client disconnected.
        """
        answer = Answer(caller, route.family, self._parts.limits.slow_client_s)
        given = RequestInput(caller, route, parsed, answer, meter)
        if route.path == EMBEDDINGS:
            return await self._embed(given)
        context = RequestContext(given)
        await self._run(self._preparation, context)
        retries = Retries(self._parts.retry, self._parts.budget, self._parts.rng)
        while True:
            try:
                await self._try(context)
            except (UpstreamError, NoWorkerError) as error:
                if not await self._should_retry(context, error, retries):
                    if not caller.started and isinstance(error, NoWorkerError):
                        raise
                    meter.failed(error)
                    if caller.started:
                        meter.cut()
                    await answer.fail(error)
                    return _totals(context)
            else:
                totals = _totals(context)
                meter.done(totals)
                return totals

    async def _embed(self, given: RequestInput) -> Totals:
        try:
            totals = await self._embeddings.serve(given)
        except ExceptionGroup as group:
            error = group.exceptions[0]  # the others were cancelled or failed for the same reason
            if isinstance(error, UpstreamError):
                given.meter.failed(error)
            raise error from None
        given.meter.done(totals)
        return totals

    async def _should_retry(
        self, context: RequestContext, error: UpstreamError | NoWorkerError, retries: Retries
    ) -> bool:
        """Whether to make another attempt; returns after the pause before it."""
        state, started = context.state, context.input.caller.started
        if isinstance(error, NoWorkerError):
            recovery, model = self._parts.recovery, context.prepared.model
            if started:
                return await recovery.for_stream(model, "regular", "grpc")
            return await self._recovers(model)
        state.losses += error.kind in ("closed", "stall")
        if state.begun and self._can_continue(context):
            context.input.meter.continued()
            return state.losses <= self._parts.failover.max_moves
        pause_s = None if started else retries.next_pause_s()
        if pause_s is None:
            return False
        await asyncio.sleep(pause_s)
        if state.begun:  # no worker can continue it, so it starts over
            await self._run(self._preparation, context)
        return True

    def _can_continue(self, context: RequestContext) -> bool:
        paired = self._parts.registry.paired(context.prepared.model, "grpc")
        if paired or not self._parts.failover.enabled:
            return False
        workers = self._parts.registry.workers
        return any(w.found.journals and w.connection == "grpc" for w in workers)

    async def _recovers(self, model: str | None) -> bool:
        """Wait for workers that were lost a moment ago; return whether a request has some."""
        kinds: tuple[Kind, ...] = ("regular",)
        if self._parts.registry.paired(model, "grpc"):
            kinds = ("prefill", "decode")
        return all([await self._parts.recovery.for_request(model, kind, "grpc") for kind in kinds])

    async def _try(self, context: RequestContext) -> None:
        state = context.state
        success = False
        try:
            for stage in self._attempt:
                context.input.caller.span.event(stage.name, {})
                await self._run(stage, context)
            success = True
        except UpstreamError as error:
            self._blame(context, error)
            raise
        except RequestError:
            success = state.dispatch is not None  # a healthy worker rejects bad requests
            raise
        finally:
            await self._close(context, success=success)

    async def _close(self, context: RequestContext, *, success: bool) -> None:
        """Update the counts before the first await: the client may be gone by then."""
        state = context.state
        if state.prefill is not None:
            state.prefill.close()
            state.prefill = None
        if state.dispatch is not None:
            if success:
                state.dispatch.succeeded()
            state.dispatch.close()
            state.dispatch = None
            totals = _totals(context)
            outcome = PlacementOutcome(
                success=success,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.cached_tokens,
            )
            context.placed.completed(outcome)
        replies, state.replies = state.replies, None
        if replies is not None:
            await replies.aclose()

    def _blame(self, context: RequestContext, error: UpstreamError) -> None:
        state, prefill = context.state, context.state.prefill
        if state.dispatch is None:
            return
        worker, dispatch = context.placed.worker, state.dispatch
        if prefill is not None and prefill.error is error:
            worker, dispatch = prefill.worker, prefill.dispatch
        state.avoid.add(worker.id)
        metrics = self._parts.metrics.worker
        metrics.errors.labels(worker.kind, worker.connection, error.kind).inc()
        if error.kind in _WORKERS_FAULT:
            dispatch.failed()
            self._parts.health.suspect(worker)

    async def _run(self, stage: PipelineStage, context: RequestContext) -> None:
        began = self._parts.clock()
        try:
            await stage.run(context)
        finally:
            spent = self._parts.clock() - began
            self._parts.metrics.router.stages.labels("grpc", stage.name).observe(spent)


def _totals(context: RequestContext) -> Totals:
    """Sum the token counts; the prompt that samples share counts once."""
    samples = context.state.samples
    first = samples[0].usage if samples else Usage()
    return Totals(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(sample.usage.completion_tokens for sample in samples),
        cached_tokens=first.cached_tokens,
    )
