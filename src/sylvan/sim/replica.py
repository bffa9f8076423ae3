"""One replica: the real scheduler and cache, driven as by `SchedulerLoop`."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.features.recurrent.control import RecurrentStates
from sylvan.runtime.sched.limits import SchedulerDeps
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.sim.clock import ReplicaClock
from sylvan.sim.cost import NoisyStepTimes
from sylvan.sim.executor import TOKEN, TimedExecutor
from sylvan.sim.profile import SchedulerProfile

_MIN_WAIT_S, _MAX_WAIT_S = 0.001, 0.05  # as in `engine.scheduler_loop`
MIN_SKIPPED, MAX_SKIPPED = 4, 512  # iterations skipped at once
_MAX_REQUESTS_PER_STEP = 1024  # as above


@dataclass(frozen=True, slots=True)
class EmittedOutputs:
    """Outputs that a replica sent to its clients at one time.

    Attributes:
        at_s: Time.
        outputs: First tokens and ends; other tokens are included with the ends.
        refused: Rejected requests, with reasons.
    """

    at_s: float
    outputs: Sequence[TokenOutput]
    refused: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Iterations that only decode.

    Attributes:
        begins_s: Start of each, and of the first one after them.
        model_s: Duration of the model's part of each.
    """

    begins_s: Sequence[float]
    model_s: NDArray[np.float64]

    def steps_until(self, arrival_s: float | None) -> int:
        """Return the number of iterations that start before a request arrives; None: none does."""
        last = len(self.begins_s) - 1
        return last if arrival_s is None else min(last, bisect_left(self.begins_s, arrival_s))


class SimulatedReplica:
    """Receives requests, and runs one iteration of the scheduler's loop at a time.

    Args:
        engine: Setup of its scheduler.
        times: Step durations.
        skips: Skip runs of decode steps if nothing can happen in between; the result is the
            same, but faster.

    Attributes:
        clock: Its clock; the end of the last iteration.
        executor: Its executor.
    """

    def __init__(
        self, engine: SchedulerProfile, times: NoisyStepTimes, *, skips: bool = True
    ) -> None:
        self.clock = ReplicaClock()
        self._times = times
        limits = engine.limits
        self.executor = TimedExecutor(
            engine.caps, self.clock, times.step_s, lazily=limits.inflight == 1
        )
        self._outputs: list[TokenOutput] = []
        cache = kv_cache(engine.kv_groups, engine.prefix, engine.eviction)
        states = () if cache.states is None else (RecurrentStates(cache, cache.states),)
        parts = SchedulerDeps(
            cache=cache,
            executor=self.executor,
            policy=schedule_policy(engine.policy),
            emit=self._outputs.extend,
            capabilities=states,
            clock=self.clock,
            seed=engine.seed,
            tenant_weights=engine.tenant_weights,
        )
        self.scheduler = Scheduler(parts, limits)
        self._inbox: deque[tuple[float, GenerateRequest]] = deque()
        self._wait_s = 0.0
        self._quiescent = True
        self._skips = skips
        self._ahead: _Ahead | None = None

    def deliver(self, request: GenerateRequest, at_s: float) -> None:
        """Deliver a request; calls are in order of time."""
        self._inbox.append((at_s, request))

    def next_s(self) -> float | None:
        """Return when the next iteration starts; None: not before a request arrives."""
        now_s = self.clock.now_s
        arrival_s = self._inbox[0][0] if self._inbox else None
        if self._ahead is not None:
            return self._ahead.begins_s[self._ahead.steps_until(arrival_s)]
        if self._quiescent and self.scheduler.idle:
            return None if arrival_s is None else max(now_s, arrival_s)
        waited_s = now_s + self._wait_s
        return waited_s if arrival_s is None else min(waited_s, max(now_s, arrival_s))

    def run(self) -> EmittedOutputs | None:
        """Run one iteration, which starts at `next_s()`; return what clients get, if anything."""
        begin_s = self.next_s()
        if begin_s is None:
            return None
        clock, scheduler = self.clock, self.scheduler
        if self._ahead is not None:
            self._pass(self._ahead)
        clock.reach(begin_s)
        refused = self._receive()
        if self._quiescent and scheduler.idle:  # everything that arrived was rejected
            return EmittedOutputs(clock.now_s, (), refused)
        progressed = scheduler.step()
        outputs, emitted_s = tuple(self._outputs), clock.now_s
        self._outputs.clear()
        clock.advance(self._times.host_s(self.executor.shape))
        self._quiescent = not progressed
        longer = min(max(2 * self._wait_s, _MIN_WAIT_S), _MAX_WAIT_S)
        self._wait_s = 0.0 if progressed else longer
        if self._skips and not self._inbox and self.executor.shape.is_decode:
            self._look_ahead()
        return EmittedOutputs(emitted_s, outputs, refused) if outputs or refused else None

    def _look_ahead(self) -> None:
        """Compute when the next iterations start, if they only decode."""
        steps = self.scheduler.skipping.steps(MAX_SKIPPED)
        if steps < MIN_SKIPPED:
            return
        executor = self.executor
        model_s, host_s = self._times.decodes_s(executor.shape, steps)
        moments = np.empty(2 * steps + 1)  # sequentially, in the clock's order of additions
        moments[0], moments[1] = self.clock.now_s, executor.in_flight_s
        moments[3::2], moments[2::2] = model_s[:-1], host_s
        self._ahead = _Ahead(np.cumsum(moments)[::2].tolist(), model_s)

    def _pass(self, ahead: _Ahead) -> None:
        """Skip the iterations before the one that starts now."""
        self._ahead = None
        steps = ahead.steps_until(self._inbox[0][0] if self._inbox else None)
        if steps:
            pending = self.executor.skip(steps, ahead.model_s[:steps])
            self.scheduler.skipping.skip(steps, TOKEN, pending)
            self._times.skip(steps)
            self.clock.now_s = ahead.begins_s[steps]

    def _receive(self) -> list[tuple[str, str]]:
        now_s = self.clock.now_s
        refused: list[tuple[str, str]] = []
        for _ in range(_MAX_REQUESTS_PER_STEP):
            if not self._inbox or self._inbox[0][0] > now_s:
                break
            _, request = self._inbox.popleft()
            self._wait_s = 0.0
            try:
                self.scheduler.add(request)
            except (RequestError, CapacityError) as error:
                refused.append((request.rid, str(error)))
        return refused
