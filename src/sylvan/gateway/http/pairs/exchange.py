"""Serves one request with two workers: one prefills the prompt, the other decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sylvan.gateway.errors import NoWorkerError, UpstreamError
from sylvan.gateway.flow.retry import RETRYABLE
from sylvan.gateway.http.answer import Answer, usage_in
from sylvan.gateway.http.caller import Caller, HeaderPairs
from sylvan.gateway.http.exchange import (
    Exchange,
    ExchangeParts,
    Pinned,
    StartedAnswer,
    give_up,
    routing_request,
)
from sylvan.gateway.http.outgoing import AnswerJournal
from sylvan.gateway.http.pairs.bootstrap import (
    batch_size,
    new_rendezvous,
    with_rendezvous,
    without_rendezvous,
)
from sylvan.gateway.http.pairs.collected import WorkerReply
from sylvan.gateway.http.pairs.prompt_logprobs import PromptLogprobsMerge
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.http.relay import MAX_REFUSAL_BYTES, Relay, RetryableStatusError
from sylvan.gateway.http.routes import ProxyRoute
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.placement import PlacedRequest
from sylvan.gateway.policies.api import PlacementOutcome
from sylvan.gateway.upstream.http import Outgoing
from sylvan.gateway.workers.spec import Kind
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.journal import Totals

MAX_MERGED_BYTES = 256 << 20
"""Limit of an answer into which log probabilities of the prompt are merged."""
DRAIN_S = 5.0
"""Seconds that a prefill worker may take to finish after the decode worker has."""
_KEPT_FIELDS = ("previous_response_id", "conversation", "session_params")


@dataclass(slots=True)
class _Attempt:
    """The state of one attempt, shared by its two sides.

    Attributes:
        body: The body for both workers.
        accepted: Set when the prefill worker accepted the request; holds log probabilities of the
            prompt, if the client wants them.
        received: The decode worker sent output, so it has the KV.
        relay: Relays its answer, unless the prompt's log probabilities are merged into it.
    """

    body: bytes
    accepted: asyncio.Future[PromptLogprobsMerge | None]
    received: bool = False
    relay: Relay | None = None

    @property
    def has_kv(self) -> bool:
        """Whether the decode worker has received the KV."""
        return self.received or (self.relay is not None and self.relay.progressed)


class _Half:
    """One worker's half of the request; counts against the worker until it is closed."""

    def __init__(self, placed: PlacedRequest) -> None:
        self.worker = placed.worker
        self.dispatch = placed.worker.begin(placed.placement.new_tokens)
        self.totals = Totals()
        self.success = False
        self._placed = placed

    def close(self) -> None:
        """Release the worker."""
        self.dispatch.close()
        outcome = PlacementOutcome(
            success=self.success,
            prompt_tokens=self.totals.prompt_tokens,
            cached_tokens=self.totals.cached_tokens,
        )
        self._placed.completed(outcome)


_Work = Callable[[Outgoing, _Half, _Attempt], Awaitable[Totals]]


class PairExchange:
    """Serves one request with a prefill and a decode worker.

    Both get the same body, which names their rendezvous. The client gets the decode worker's
    answer; the prefill worker's answer is dropped. Until the client has seen part of the answer,
    another pair is tried; after that, another decode worker continues the stream alone.

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
    ) -> None:
        self._parts = parts
        self._caller = caller
        self._route = route
        self._parsed = parsed
        self._meter = meter
        self._answer = Answer(caller, route.family, parts.limits.slow_client_s)
        self._attempts = parts.attempts(route.path)
        self._journal = parts.journal(caller)
        self._edits: PromptLogprobsMerge | None = None
        self._failed: Kind = "decode"
        self._routing_request = routing_request(caller, parsed)
        self._merges = route.path == "/generate" and parsed.fields.get("return_logprob") is True
        self._headers = self._sent_headers()
        self.totals = Totals()
        self.workers: Sequence[Worker] = ()

    @property
    def tenant(self) -> str:
        """Tenant of the request."""
        return self._caller.tenant

    async def run(self, pinned: Pinned | None = None) -> None:
        """Serve the request, or send the client an error.

        Args:
            pinned: One worker of the pair; the other one is selected.

        Raises:
            UnknownModelError: No worker serves the model.
            CallerGoneError: The client disconnected.
        """
        while True:
            try:
                await self._attempt(*self._pair(pinned))
            except UpstreamError as error:
                if self._journal.begun and not self._journal.full:
                    await self._continue_alone()
                    return
                if not await self._should_retry(error):
                    await give_up(self._answer, self._meter, error)
                    return
            except NoWorkerError as error:
                if self._answer.started or not await self._recovers():
                    await give_up(self._answer, self._meter, error)
                    return
            else:
                self._meter.done(self.totals)
                return

    async def time_out(self, seconds: float) -> None:
        """Answer that the request timed out."""
        message = f"The request took longer than {seconds:g} s."
        await give_up(self._answer, self._meter, UpstreamError(message, kind="timeout", status=504))

    async def _continue_alone(self) -> None:
        """Continue the stream on another decode worker, which recomputes the prompt itself."""
        begun = StartedAnswer("decode", self._answer, self._attempts, self._journal, self._edits)
        parsed = replace(
            self._parsed, raw=without_rendezvous(self._parsed.raw, self._parsed.fields)
        )
        rest = Exchange(self._parts, self._caller, self._route, parsed, self._meter, begun=begun)
        try:
            await rest.run()
        finally:
            self.totals, self.workers = rest.totals, rest.workers

    async def _recovers(self) -> bool:
        """Wait for workers that were lost a moment ago; return whether there is a pair."""
        recovery, model = self._parts.recovery, self._parsed.model
        kinds: tuple[Kind, Kind] = ("prefill", "decode")
        return all([await recovery.for_request(model, kind, "http") for kind in kinds])

    def _place(self, kind: Kind, pinned: Pinned | None) -> PlacedRequest:
        placing = self._parts.placing
        if pinned is not None and pinned.worker.kind == kind:
            if pinned.worker.available:
                return placing.pin(pinned.worker, self._routing_request)
            if pinned.strict:
                raise NoWorkerError(f"The worker {pinned.worker.id} is not available.")
        return placing.place(
            self._parsed.model,
            self._routing_request,
            kind=kind,
            connection="http",
            avoid=self._attempts.avoid,
        )

    def _pair(self, pinned: Pinned | None) -> tuple[_Half, _Half]:
        """Select both workers.

        Raises:
            UnknownModelError: No worker serves the model.
            NoWorkerError: There is no worker of one kind.
        """
        prefill = _Half(self._place("prefill", pinned))
        try:
            return prefill, _Half(self._place("decode", pinned))
        except BaseException:
            prefill.close()
            raise

    async def _attempt(self, prefill: _Half, decode: _Half) -> None:
        self.workers = (prefill.worker, decode.worker)
        for half in (prefill, decode):
            self._caller.span.event("dispatch", {"worker": half.worker.url})
        parsed = self._parsed
        size = batch_size(self._route.path, parsed.fields)
        meet = partial(new_rendezvous, prefill.worker)
        body = with_rendezvous(parsed.raw, parsed.fields, size, meet)
        loop = asyncio.get_running_loop()
        attempt = _Attempt(body, loop.create_future())
        feeding = loop.create_task(self._send(prefill, attempt, self._feed))
        decoding = loop.create_task(self._send(decode, attempt, self._decode))
        try:
            await asyncio.wait((feeding, decoding), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and not decoding.done() and not attempt.has_kv:
                await feeding  # if this fails later, the decode worker waits in vain
            await decoding
            await asyncio.wait((feeding,), timeout=DRAIN_S)
        finally:
            for task in (feeding, decoding):
                task.cancel()
            prefill.close()  # before the first await: the client may be gone by then
            decode.close()
            await asyncio.gather(feeding, decoding, return_exceptions=True)

    async def _send(self, half: _Half, attempt: _Attempt, work: _Work) -> None:
        """Send the request to one of the two, and record the outcome."""
        worker, sender = half.worker, self._parts.sender
        request = sender.outgoing(self._caller, self._headers, worker, attempt.body)
        try:
            half.totals = await work(request, half, attempt)
            half.dispatch.succeeded()
            half.success = True
        except UpstreamError as error:
            self._failed = worker.kind
            self._caller.span.event("failure", {"worker": worker.url, "kind": error.kind})
            self._attempts.blame(worker, half.dispatch, error)
            raise

    async def _feed(self, request: Outgoing, half: _Half, attempt: _Attempt) -> Totals:
        """Read the prefill worker's answer.

        Raises:
            UpstreamError: The answer was cut off.
            RefusedError: The worker rejected the request.
        """

        def taken() -> None:
            if not self._merges:
                attempt.accepted.set_result(None)

        bound = MAX_MERGED_BYTES if self._merges else MAX_REFUSAL_BYTES
        answer = WorkerReply(half.dispatch, bound, keeps=self._merges, taken=taken)
        await self._collect(request, half, answer)
        body = bytes(answer.body)
        if self._merges:
            attempt.accepted.set_result(PromptLogprobsMerge(body))
        return usage_in(body) if len(body) <= MAX_REFUSAL_BYTES else Totals()

    async def _decode(self, request: Outgoing, half: _Half, attempt: _Attempt) -> Totals:
        """Relay the decode worker's answer.

        Raises:
            UpstreamError: The answer was cut off.
            RefusedError: The worker rejected the request, and the client has seen nothing.
        """
        if self._merges and not self._parsed.stream:
            self.totals = await self._merge(request, half, attempt)
            return self.totals

        async def accepted() -> None:
            relay.edits = self._edits = await attempt.accepted

        relay = Relay(self._answer, half.dispatch, self._meter, before=accepted)
        attempt.relay = relay
        await self._parts.sender.send(request, half.worker, self._journal, relay, 0.0)
        self.totals = relay.totals
        return self.totals

    async def _merge(self, request: Outgoing, half: _Half, attempt: _Attempt) -> Totals:
        """Merge the prompt's log probabilities into a whole answer."""
        answer = WorkerReply(half.dispatch, MAX_MERGED_BYTES, keeps=True)
        await self._collect(request, half, answer)
        self._meter.answered(answer.status)
        prompt = await attempt.accepted
        assert prompt is not None, (
            "the prefill worker's answer is kept when log probabilities are merged"
        )
        body = prompt.whole(bytes(answer.body))
        attempt.received = True
        self._meter.first_byte()
        kept = [pair for pair in answer.headers if pair[0] != "content-length"]
        await self._answer.head(answer.status, [*kept, ("content-length", str(len(body)))])
        await self._answer.data(body)
        await self._answer.end()
        return self._answer.totals()

    async def _collect(self, request: Outgoing, half: _Half, answer: WorkerReply) -> None:
        """Send the request to a worker, and collect its answer."""
        journal = AnswerJournal(self._journal.ticket, max_bytes=0)
        await self._parts.sender.send(request, half.worker, journal, answer, 0.0)

    async def _should_retry(self, error: UpstreamError) -> bool:
        if self._answer.started:
            return False
        if isinstance(error, RetryableStatusError) and error.refusal.status not in RETRYABLE:
            return False
        return await self._attempts.should_retry(self._failed)

    def _sent_headers(self) -> HeaderPairs:
        headers = self._parts.sender.forwarding.headers(self._caller)
        if not self._merges:
            return headers
        return [pair for pair in headers if pair[0] != "accept-encoding"]  # the gateway reads it


def needs_one_worker(parsed: ParsedBody) -> bool:
    """Whether one worker must serve a request alone, because it keeps state for it."""
    return any(parsed.fields.get(name) for name in _KEPT_FIELDS)
