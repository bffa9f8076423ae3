"""Least slack first among requests that can still meet their target for the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.sched.feature import Feature
from sylvan.runtime.sched.policies.api import WINDOW, PolicyContext, SchedulePolicy
from sylvan.utils.clock import Clock

DEFAULT_TTFT_MS = 10_000.0
FIRST_RATE = 1000.0  # prompt tokens per second until the first measurement
SMOOTHING = 0.1


class LeastSlack(Feature):
    """Maximises goodput: requests that meet their `ttft_ms`.

    Slack is the time left to a request's target less the time its uncached prompt takes, at the
    rate measured lately. Those that cannot meet the target any more go after those that can.
    """

    def __init__(self, cached_tokens: Callable[[Req], int], clock: Clock) -> None:
        self._cached_tokens = cached_tokens
        self._clock = clock
        self._rate = FIRST_RATE
        self._last: tuple[float, int] | None = None  # when a step began, and its tokens

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        """See `SchedulePolicy.order`."""
        now = self._clock()
        slack = {r.order: self._slack(r, now) for r in waiting[:WINDOW]}
        ranked = sorted(waiting[:WINDOW], key=lambda r: (slack[r.order] < 0, slack[r.order]))
        return [*ranked, *waiting[WINDOW:]]

    def on_batch(self, batch: Batch) -> None:
        """Measure how many tokens a second are computed while there is work."""
        now = self._clock()
        if self._last and now > self._last[0]:
            rate = self._last[1] / (now - self._last[0])
            self._rate += SMOOTHING * (rate - self._rate)
        self._last = (now, batch.num_tokens) if batch.slices else None

    def _slack(self, req: Req, now: float) -> float:
        request = req.request
        target = request.ttft_ms if isinstance(request, GenerateRequest) else None
        due = req.arrived_s + (DEFAULT_TTFT_MS if target is None else target) / 1e3
        return due - now - (req.num_tokens - self._cached_tokens(req)) / max(self._rate, 1.0)


def build(context: PolicyContext) -> SchedulePolicy:
    """See `schedule_policy`."""
    return LeastSlack(context.cached_tokens, context.clock)
