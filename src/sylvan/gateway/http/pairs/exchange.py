"""One request that two workers serve: one computes the prompt, the other one continues it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sylvan.gateway.errors import NoWorkerError, UpstreamError
from sylvan.gateway.flow.retry import RETRYABLE
from sylvan.gateway.http.answer import Answer, usage_in
from sylvan.gateway.http.asked import ParsedBody
from sylvan.gateway.http.caller import Caller, HeaderPairs
from sylvan.gateway.http.exchange import (
    Begun,
    Exchange,
    ExchangeParts,
    Pinned,
    give_up,
    placed_as,
)
from sylvan.gateway.http.outgoing import AnswerJournal
from sylvan.gateway.http.pairs.bootstrap import (
    batch_size,
    new_meeting,
    with_meetings,
    without_meetings,
)
from sylvan.gateway.http.pairs.collected import WorkerReply
from sylvan.gateway.http.pairs.prompt_logprobs import PromptLogprobsMerge
from sylvan.gateway.http.relay import MAX_REFUSAL_BYTES, Relay, RetryableStatusError
from sylvan.gateway.http.routes import Passed
from sylvan.gateway.observe.meter import RequestMeter
from sylvan.gateway.placing import PlacedRequest
from sylvan.gateway.policies.api import PlacementOutcome
from sylvan.gateway.upstream.http import Outgoing
from sylvan.gateway.workers.spec import Kind
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.journal import Totals

MAX_MERGED_BYTES = 256 << 20
"""Bound on an answer that log probabilities of the prompt are put into."""
DRAIN_S = 5.0
"""How long a prefill worker may take to end its answer after the decode worker has."""
_KEPT_FIELDS = ("previous_response_id", "conversation", "session_params")


@dataclass(slots=True)
class _Attempt:
    """One attempt, as its two sides see it.

    Attributes:
        body: What both workers get.
        accepted: Set when the prefill worker has taken the request; with log probabilities of the
            prompt, if the client wants them.
        received: The decode worker has given something, so it has the keys and values.
        relay: Passes its answer on, unless the prompt's log probabilities are put into it.
    """

    body: bytes
    accepted: asyncio.Future[PromptLogprobsMerge | None]
    received: bool = False
    relay: Relay | None = None

    @property
    def has_kv(self) -> bool:
        """Whether the decode worker has what it needs of the other one."""
        return self.received or (self.relay is not None and self.relay.progressed)


class _Half:
    """The part of one of the two workers; counts against it until it is closed."""

    def __init__(self, placed: PlacedRequest) -> None:
        self.worker = placed.worker
        self.dispatch = placed.worker.begin(placed.placement.new_tokens)
        self.totals = Totals()
        self.success = False
        self._placed = placed

    def close(self) -> None:
        """The worker is done with it."""
        self.dispatch.close()
        outcome = PlacementOutcome(
            success=self.success,
            prompt_tokens=self.totals.prompt_tokens,
            cached_tokens=self.totals.cached_tokens,
        )
        self._placed.completed(outcome)


_Work = Callable[[Outgoing, _Half, _Attempt], Awaitable[Totals]]


class PairExchange:
    """Serves one request by a prefill and a decode worker.

    Both get the same body, which says where they meet. The answer is the decode worker's; that of
    the prefill worker is read and dropped. As long as the client has seen nothing, another pair is
    tried; later another decode worker goes on with what the client has, alone.

    Attributes:
        totals: Tokens of the request, once it is served.
        workers: Who served it last.
    """

    def __init__(
        self,
        parts: ExchangeParts,
        caller: Caller,
        route: Passed,
        asked: ParsedBody,
        meter: RequestMeter,
    ) -> None:
        self._parts = parts
        self._caller = caller
        self._route = route
        self._asked = asked
        self._meter = meter
        self._answer = Answer(caller, route.family, parts.limits.slow_client_s)
        self._attempts = parts.attempts(route.path)
        self._journal = parts.journal(caller)
        self._edits: PromptLogprobsMerge | None = None
        self._failed: Kind = "decode"
        self._placed_as = placed_as(caller, asked)
        self._merges = route.path == "/generate" and asked.fields.get("return_logprob") is True
        self._headers = self._sent_headers()
        self.totals = Totals()
        self.workers: Sequence[Worker] = ()

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self._caller.tenant

    async def run(self, pinned: Pinned | None = None) -> None:
        """Serve it, or tell the client why not.

        Args:
            pinned: Who is to serve it; the other one of the pair is chosen.

        Raises:
            UnknownModelError: No worker serves the model.
            CallerGoneError: The client left.
        """
        while True:
            try:
                await self._attempt(*self._pair(pinned))
            except UpstreamError as error:
                if self._journal.begun and not self._journal.full:
                    await self._go_on()
                    return
                if not await self._tries_again(error):
                    await give_up(self._answer, self._meter, error)
                    return
            except NoWorkerError as error:
                await give_up(self._answer, self._meter, error)
                return
            else:
                self._meter.done(self.totals)
                return

    async def time_out(self, seconds: float) -> None:
        """It took too long."""
        message = f"The request took longer than {seconds:g} s."
        await give_up(self._answer, self._meter, UpstreamError(message, kind="timeout", status=504))

    async def _go_on(self) -> None:
        """Have another decode worker give the rest of the answer; it computes the prompt itself."""
        begun = Begun("decode", self._answer, self._attempts, self._journal, self._edits)
        asked = replace(self._asked, raw=without_meetings(self._asked.raw, self._asked.fields))
        rest = Exchange(self._parts, self._caller, self._route, asked, self._meter, begun=begun)
        try:
            await rest.run()
        finally:
            self.totals, self.workers = rest.totals, rest.workers

    def _place(self, kind: Kind, pinned: Pinned | None) -> PlacedRequest:
        placing = self._parts.placing
        if pinned is not None and pinned.worker.kind == kind:
            if pinned.worker.available:
                return placing.pin(pinned.worker, self._placed_as)
            if pinned.strict:
                raise NoWorkerError(f"The worker {pinned.worker.id} is not available.")
        return placing.place(
            self._asked.model,
            self._placed_as,
            kind=kind,
            connection="http",
            avoid=self._attempts.avoid,
        )

    def _pair(self, pinned: Pinned | None) -> tuple[_Half, _Half]:
        """Choose both workers.

        Raises:
            UnknownModelError: No worker serves the model.
            NoWorkerError: There is none of one kind.
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
        asked = self._asked
        size = batch_size(self._route.path, asked.fields)
        meet = partial(new_meeting, prefill.worker)
        body = with_meetings(asked.raw, asked.fields, size, meet)
        loop = asyncio.get_running_loop()
        attempt = _Attempt(body, loop.create_future())
        feeding = loop.create_task(self._send(prefill, attempt, self._feed))
        decoding = loop.create_task(self._send(decode, attempt, self._decode))
        try:
            await asyncio.wait((feeding, decoding), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and not decoding.done() and not attempt.has_kv:
                await feeding  # a failure now leaves the decode worker waiting for nothing
            await decoding
            await asyncio.wait((feeding,), timeout=DRAIN_S)
        finally:
            for task in (feeding, decoding):
                task.cancel()
            prefill.close()  # before anything is waited for: the client may be gone by now
            decode.close()
            await asyncio.gather(feeding, decoding, return_exceptions=True)

    async def _send(self, half: _Half, attempt: _Attempt, work: _Work) -> None:
        """Send the request to one of the two, and count what comes of it."""
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
        """Read what the prefill worker answers.

        Raises:
            UpstreamError: It broke off.
            RefusedError: It refused.
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
        """Pass on what the decode worker answers.

        Raises:
            UpstreamError: It broke off.
            RefusedError: It refused, and the client has seen nothing.
        """
        if self._merges and not self._asked.stream:
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
        """Put the log probabilities of the prompt into a whole answer."""
        answer = WorkerReply(half.dispatch, MAX_MERGED_BYTES, keeps=True)
        await self._collect(request, half, answer)
        self._meter.answered(answer.status)
        prompt = await attempt.accepted
        assert prompt is not None, "the prefill worker's answer is read where it is wanted"
        body = prompt.whole(bytes(answer.body))
        attempt.received = True
        self._meter.first_byte()
        kept = [pair for pair in answer.headers if pair[0] != "content-length"]
        await self._answer.head(answer.status, [*kept, ("content-length", str(len(body)))])
        await self._answer.data(body)
        await self._answer.end()
        return self._answer.totals()

    async def _collect(self, request: Outgoing, half: _Half, answer: WorkerReply) -> None:
        """Have a worker serve the request, for the gateway to read."""
        journal = AnswerJournal(self._journal.ticket, max_bytes=0)
        await self._parts.sender.send(request, half.worker, journal, answer, 0.0)

    async def _tries_again(self, error: UpstreamError) -> bool:
        if self._answer.started:
            return False
        if isinstance(error, RetryableStatusError) and error.refusal.status not in RETRYABLE:
            return False
        return await self._attempts.another(self._failed)

    def _sent_headers(self) -> HeaderPairs:
        headers = self._parts.sender.forwarding.headers(self._caller)
        if not self._merges:
            return headers
        return [pair for pair in headers if pair[0] != "accept-encoding"]  # it is read here


def needs_one_worker(asked: ParsedBody) -> bool:
    """Whether a request needs what only one worker keeps, which then serves it alone."""
    return any(asked.fields.get(name) for name in _KEPT_FIELDS)
