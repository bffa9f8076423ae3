"""Discrete-event simulation of all replicas, their router and their clients."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sylvan.config.route import RoutingConfig
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.sim.clock import ReplicaClock
from sylvan.sim.cost import NoisyStepTimes, Scatter
from sylvan.sim.executor import TOKEN
from sylvan.sim.outcomes import Outcomes
from sylvan.sim.profile import Profile
from sylvan.sim.replica import EmittedOutputs, SimulatedReplica
from sylvan.sim.routing import RoutedRequest, SimulatedRouter
from sylvan.sim.workload import (
    Ids,
    SimulatedConversation,
    SimulatedPrompts,
    SimulatedTurn,
    Workload,
)

Progress = Callable[[int, int], None]
"""Called with the number of finished requests, and of all."""

YOUNG_OBJECTS = 200_000
"""For `garbage.freeze`: most requests finish before this many objects are new."""
PROGRESS_EVERY = 256  # requests between two calls of `Progress`
_BEGIN, _ARRIVE, _RUN, _EMIT = range(4)  # order of simultaneous events


@dataclass(slots=True)
class _ActiveConversation:
    """A conversation in progress."""

    conversation: SimulatedConversation
    number: int
    due_s: float
    turn: int = 0
    history: Ids | None = None


@dataclass(slots=True)
class _Live:
    """A request in flight.

    Attributes:
        place: Index in the outcomes; -1 while warming up.
        late_s: How much later than usual its answer reaches the client; may be negative.
    """

    rid: str
    active: _ActiveConversation
    turn: SimulatedTurn
    ids: Ids
    place: int
    late_s: float
    sent: RoutedRequest | None = None


class Fleet:
    """One scenario: replicas with one profile behind one router.

    Args:
        profile: Profile of each replica.
        routing: Routing policy.
        replicas: Number of replicas.
        seed: Seed of the noise and of random policies.
        scatter: Whether durations have the measured noise.
        skips: See `SimulatedReplica`.

    Attributes:
        replicas: By number.
        outcomes: Outcomes so far, with times from the start of the measurement.
        max_concurrent: Largest number of concurrent requests.
    """

    def __init__(
        self,
        profile: Profile,
        routing: RoutingConfig,
        replicas: int,
        *,
        seed: int = 0,
        scatter: bool = True,
        skips: bool = True,
    ) -> None:
        seeds = [[seed, number] if scatter else None for number in range(replicas)]
        self.replicas = [
            SimulatedReplica(
                profile.engine,
                NoisyStepTimes(profile.step, profile.host, seeds[number]),
                skips=skips,
            )
            for number in range(replicas)
        ]
        self._ttft_ms: float | None = None
        self._tpot_ms: float | None = None
        self.outcomes = Outcomes()
        self.max_concurrent = 0
        self._overhead_s = profile.request.constant
        self._late = Scatter(profile.request.spread, [seed] if scatter else None, 0.0)
        clock, held = ReplicaClock(), profile.engine.cache_tokens
        self._router = SimulatedRouter(routing, replicas, held, clock, seed)
        self._prompts = SimulatedPrompts()
        self._events: list[tuple[float, int, int, Callable[[Any, float], None], Any]] = []
        self._pushed = 0
        self._planned: list[float | None] = [None] * replicas  # time of each replica's next run
        self._live: dict[str, _Live] = {}
        self._queue: deque[_ActiveConversation] = deque()  # waiting at the concurrency limit
        self._rids = 0
        self._ended = 0
        self._limit = 0
        self._began_s = 0.0
        self._measured = False
        self._coming: Iterator[tuple[int, SimulatedConversation]] = iter(())
        self._params: dict[int, SamplingParams] = {}

    def run(self, workload: Workload, progress: Progress = lambda done, total: None) -> Outcomes:
        """Serve the whole workload, once."""
        self._ttft_ms, self._tpot_ms = (
            1e3 * workload.slo[name] if name in workload.slo else None for name in ("ttft", "tpot")
        )
        warmup = [SimulatedConversation([turn], 0.0) for turn in workload.warmup]
        end_s = self._serve(warmup, 0.0, 1, lambda done, total: None)
        self._measured, self.max_concurrent = True, 0
        limit = workload.concurrency or workload.num_requests
        self._serve(workload.conversations, end_s, limit, progress)
        return self.outcomes

    # ---- the loop

    def _serve(
        self, work: Sequence[SimulatedConversation], began_s: float, limit: int, progress: Progress
    ) -> float:
        """Serve conversations until all are finished."""
        self._began_s, self._limit, self._ended = began_s, limit, 0
        total, reported, now_s = sum(len(each.turns) for each in work), 0, began_s
        self._coming = enumerate(sorted(work, key=lambda each: each.due_s))
        self._next_conversation()
        events, pop = self._events, heapq.heappop
        while events:
            now_s, _, _, act, what = pop(events)
            act(what, now_s)
            if self._ended - reported >= PROGRESS_EVERY:
                reported = self._ended
                progress(reported, total)
        progress(self._ended, total)
        return now_s

    def _push(self, at_s: float, kind: int, act: Callable[[Any, float], None], what: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (at_s, kind, self._pushed, act, what))

    def _next_conversation(self) -> None:
        number, conversation = next(self._coming, (0, None))
        if conversation is not None:
            due_s = self._began_s + conversation.due_s
            self._push(due_s, _BEGIN, self._begin, _ActiveConversation(conversation, number, due_s))

    # ---- clients

    def _begin(self, active: _ActiveConversation, now_s: float) -> None:
        self._next_conversation()
        self._ask(active, now_s)

    def _ask(self, active: _ActiveConversation, now_s: float) -> None:
        """Send the next turn of a conversation, now or when the concurrency limit allows."""
        if len(self._live) >= self._limit:
            self._queue.append(active)
            return
        turn = active.conversation.turns[active.turn]
        ids = self._prompts.ids(turn.parts)
        if active.history is not None:
            ids = np.concatenate([active.history, ids])
        place = -1
        if self._measured:
            due_s = active.due_s if active.turn == 0 else now_s
            base = self._began_s
            place = self.outcomes.add(due_s - base, now_s - base, len(ids))
        self._rids += 1
        live = _Live(str(self._rids), active, turn, ids, place, self._late.draw())
        self._live[live.rid] = live
        self.max_concurrent = max(self.max_concurrent, len(self._live))
        self._push(now_s + self._overhead_s, _ARRIVE, self._arrive, live)

    def _arrive(self, live: _Live, now_s: float) -> None:
        """A request reaches the router, and immediately its replica."""
        sent = live.sent = self._router.send(live.ids, now_s, str(live.active.number))
        if live.place >= 0:
            self.outcomes.replica[live.place] = sent.replica
        request = GenerateRequest(
            rid=live.rid,
            input_ids=live.ids,
            output_ids=EMPTY_IDS,
            sampling=self._sampling(live.turn.output_tokens),
            interval=None,
            ttft_ms=self._ttft_ms,
            tpot_ms=self._tpot_ms,
        )
        self.replicas[sent.replica].deliver(request, now_s)
        self._plan(sent.replica)

    def _sampling(self, output_tokens: int) -> SamplingParams:
        found = self._params.get(output_tokens)
        if found is None:
            found = SamplingParams(
                max_new_tokens=output_tokens, ignore_eos=True, temperature=0.0, sampling_seed=0
            )
            self._params[output_tokens] = found
        return found

    # ---- replicas

    def _plan(self, number: int) -> None:
        """Schedule a replica's next run, unless it is already scheduled."""
        at_s = self.replicas[number].next_s()
        if at_s != self._planned[number]:
            self._planned[number] = at_s
            if at_s is not None:
                self._push(at_s, _RUN, self._run, number)

    def _run(self, number: int, now_s: float) -> None:
        if now_s != self._planned[number]:
            return  # rescheduled since
        emitted = self.replicas[number].run()
        self._planned[number] = None
        if emitted is not None:
            self._push(emitted.at_s, _EMIT, self._deliver, emitted)
        self._plan(number)

    def _deliver(self, emitted: EmittedOutputs, now_s: float) -> None:
        for rid, error in emitted.refused:
            self._end(self._live[rid], now_s, error, None)
        for output in emitted.outputs:
            live = self._live[output.rid]
            finish = output.finish
            failed = finish is not None and finish.type == "abort"
            if output.token_ids and not failed:
                self._first(live, now_s)
            if finish is not None:
                self._end(live, now_s, (finish.message or "aborted") if failed else "", output)

    def _first(self, live: _Live, now_s: float) -> None:
        if live.sent is not None:
            live.sent.dispatch.answered()
        column = self.outcomes.first_s
        if live.place >= 0 and not column[live.place]:
            column[live.place] = self._received_s(live, now_s)

    def _received_s(self, live: _Live, now_s: float) -> float:
        """Return when the client receives what is sent now."""
        at_s = now_s - self._began_s + live.late_s
        return max(at_s, self.outcomes.sent_s[live.place])

    def _end(self, live: _Live, now_s: float, error: str, output: TokenOutput | None) -> None:
        """A request finished; the next one may start."""
        del self._live[live.rid]
        self._ended += 1
        usage = None if output is None else output.usage
        cached = usage.cached_tokens if usage else 0
        assert live.sent is not None
        self._router.ended(
            live.sent, success=not error, prompt=len(live.ids), cached=cached, now_s=now_s
        )
        if live.place >= 0:
            self._record_end(live, now_s, error, output)
        active = live.active
        active.turn += 1
        if not error and active.turn < len(active.conversation.turns):
            answer = np.full(live.turn.output_tokens, TOKEN, np.int32)
            active.history = np.concatenate([live.ids, answer])
            self._ask(active, now_s)
        if self._queue and len(self._live) < self._limit:
            self._ask(self._queue.popleft(), now_s)

    def _record_end(
        self, live: _Live, now_s: float, error: str, output: TokenOutput | None
    ) -> None:
        outcomes, place = self.outcomes, live.place
        outcomes.end_s[place] = self._received_s(live, now_s)
        if error:
            outcomes.errors[place] = error
        if output is not None and output.usage is not None:
            outcomes.output[place] = output.usage.completion_tokens
            outcomes.cached[place] = output.usage.cached_tokens
            outcomes.retractions[place] = output.usage.retractions
