"""Runs requests through the seven stages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sylvan.config.route import LimitsConfig, RetryConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.flow.retry import Retries, RetryBudget
from sylvan.gateway.grpc.context import RequestContext, RequestInput, Stage
from sylvan.gateway.grpc.stages.client_acquisition import ClientAcquisition
from sylvan.gateway.grpc.stages.dispatch_metadata import DispatchMetadata
from sylvan.gateway.grpc.stages.preparation import Preparation
from sylvan.gateway.grpc.stages.request_building import RequestBuilding
from sylvan.gateway.grpc.stages.request_execution import RequestExecution
from sylvan.gateway.grpc.stages.response_processing import ResponseProcessing
from sylvan.gateway.grpc.stages.worker_selection import WorkerSelection
from sylvan.gateway.http.answer import Answer
from sylvan.gateway.http.asked import Asked
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.http.routes import Passed
from sylvan.gateway.observe.families import Families
from sylvan.gateway.observe.meter import Meter
from sylvan.gateway.placing import Placing
from sylvan.gateway.policies.api import Outcome
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.upstream.grpc import GrpcUpstream
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.gateway.workers.health import HealthChecks
from sylvan.gateway.workers.registry import Registry
from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import Totals
from sylvan.utils.clock import Clock

_WORKERS_FAULT = ("connect", "closed", "stall", "protocol")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcParts:
    """What the router works with.

    Attributes:
        registry: All workers.
        placing: Chooses them.
        library: Text of their models.
        upstream: Channels to them.
        probe: Knows how they know us.
        health: Looks after those that look lost.
        families: Metrics.
        budget: Of retries, for all requests together.
        retry: When to try again.
        limits: How long a client may be.
        clock: For durations.
        wall: Seconds since 1970.
        rng: For jitter.
    """

    registry: Registry
    placing: Placing
    library: TextLibrary
    upstream: GrpcUpstream
    probe: GrpcProbe
    health: HealthChecks
    families: Families
    budget: RetryBudget
    retry: RetryConfig
    limits: LimitsConfig
    clock: Clock
    wall: Clock
    rng: random.Random = field(default_factory=random.Random)


class GrpcRouter:
    """Serves requests by workers that speak gRPC.

    Preparation is done once. Another attempt begins with the selection of a worker; after the
    first byte to the client there is none.
    """

    def __init__(self, parts: GrpcParts) -> None:
        self._parts = parts
        self._preparation = Preparation(parts.registry, parts.library, parts.wall)
        self._attempt: Sequence[Stage] = (
            WorkerSelection(parts.placing),
            ClientAcquisition(parts.upstream),
            RequestBuilding(),
            DispatchMetadata(parts.probe),
            RequestExecution(parts.limits.request_timeout_s),
            ResponseProcessing(),
        )

    async def serve(self, caller: Caller, route: Passed, asked: Asked, meter: Meter) -> Totals:
        """Serve one request, or tell the client why not; returns its tokens.

        Raises:
            RequestError: It cannot be served.
            CapacityError: Not now.
            CallerGoneError: The client left.
        """
        answer = Answer(caller, route.family, self._parts.limits.slow_client_s)
        context = RequestContext(RequestInput(caller, route, asked, answer, meter))
        await self._run(self._preparation, context)
        retries = Retries(self._parts.retry, self._parts.budget, self._parts.rng)
        while True:
            try:
                await self._try(context)
            except UpstreamError as error:
                pause_s = None if caller.started else retries.next_pause_s()
                if pause_s is None:
                    meter.failed(error)
                    if caller.started:
                        meter.cut()
                    await answer.fail(error)
                    return _totals(context)
                await asyncio.sleep(pause_s)
            else:
                totals = _totals(context)
                meter.done(totals)
                return totals

    async def _try(self, context: RequestContext) -> None:
        state = context.state
        success = False
        state.totals.clear()
        try:
            for stage in self._attempt:
                context.input.caller.span.event(stage.name, {})
                await self._run(stage, context)
            success = True
        except UpstreamError as error:
            self._blame(context, error)
            raise
        except RequestError:
            success = state.dispatch is not None  # a working worker refuses bad requests
            raise
        finally:
            await self._close(context, success=success)

    async def _close(self, context: RequestContext, *, success: bool) -> None:
        state = context.state
        if state.replies is not None:
            await state.replies.aclose()
            state.replies = None
        if state.dispatch is None:
            return
        if success:
            state.dispatch.succeeded()
        state.dispatch.close()
        state.dispatch = None
        totals = _totals(context)
        outcome = Outcome(
            success=success,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
        )
        context.placed.completed(outcome)

    def _blame(self, context: RequestContext, error: UpstreamError) -> None:
        state = context.state
        if state.dispatch is None:
            return
        worker = context.placed.worker
        state.avoid.add(worker.id)
        families = self._parts.families.worker
        families.errors.labels(worker.kind, worker.connection, error.kind).inc()
        if error.kind in _WORKERS_FAULT:
            state.dispatch.failed()
            self._parts.health.suspect(worker)

    async def _run(self, stage: Stage, context: RequestContext) -> None:
        began = self._parts.clock()
        try:
            await stage.run(context)
        finally:
            spent = self._parts.clock() - began
            self._parts.families.router.stages.labels("grpc", stage.name).observe(spent)


def _totals(context: RequestContext) -> Totals:
    """Tokens so far; the prompt that samples share counts once."""
    usages = context.state.totals
    first = next(iter(usages.values()), None)
    return Totals(
        prompt_tokens=first.prompt_tokens if first else 0,
        completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
        cached_tokens=first.cached_tokens if first else 0,
    )
