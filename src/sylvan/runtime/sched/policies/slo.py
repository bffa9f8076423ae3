"""Latency targets: least slack first, with prefill limited by running requests' deadlines."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from math import inf

from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.sched.policies.api import WINDOW, PolicyContext, SchedulePolicy

DEFAULT_TTFT_MS = 10_000.0
INITIAL_RATE = 1000.0  # prompt tokens per second until the first measurement
SMOOTHING = 0.1
BEST_CASE_FACTOR = 0.5  # steps may get this much shorter as other requests end


class LeastSlack(Capability):
    """Maximises goodput: requests that meet their `ttft_ms` and `tpot_ms`.

    Waiting requests: slack is the time left until the first-token target minus the time to compute
    the uncached prompt. The least slack goes first; requests that can no longer meet the target
    come last.

    Running requests: each token has a deadline, `tpot_ms` after the one before, counted from the
    first, so early tokens earn slack for later ones. A step computes only as many prompt tokens as
    all deadlines allow. Requests that would miss their target even if steps took only
    `BEST_CASE_FACTOR` of their time do not limit prefill.

    Both guards come from Scorpio (arXiv:2505.23022: least deadline first for first tokens, credits
    for later ones). Sizing prompt chunks by the time between tokens comes from Sarathi-Serve
    (arXiv:2403.02310 s4), with recent step times in place of a profile.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._cached_tokens = context.cached_tokens
        self._clock = context.clock
        self._decode_s = 0.0  # seconds of a step without prompts
        self._prompts = 1.0, INITIAL_RATE  # seconds beyond a decode, for so many tokens
        self._launched_s: float | None = None  # when the newest step was launched
        self._in_flight: deque[int] = deque(maxlen=context.inflight)  # prompt tokens in flight

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        now = self._clock()
        slack = {r.order: self._slack_s(r, now) for r in waiting[:WINDOW]}
        ranked = sorted(waiting[:WINDOW], key=lambda r: (slack[r.order] < 0, slack[r.order]))
        return [*ranked, *waiting[WINDOW:]]

    def prompt_tokens(self, running: Sequence[Req], priority: int) -> int:
        now = self._clock()
        spare = min((self._spare_s(r, now) for r in running if r.priority >= priority), default=inf)
        return sys.maxsize if spare == inf else max(0, int(spare / self._token_s))

    def on_batch(self, batch: Batch) -> None:
        """Update the estimates of step time, with and without prompts."""
        now = self._clock()
        if not batch.slices:
            self._in_flight.clear()
            self._launched_s = None
            return
        if self._launched_s is not None and len(self._in_flight) == self._in_flight.maxlen:
            self._measure(self._in_flight[0], now - self._launched_s)
        sizes = [] if batch.decodes else [s.stop - s.start for s in batch.slices]
        self._in_flight.append(sum(size for size in sizes if size > 1))
        self._launched_s = now

    def _measure(self, prompt_tokens: int, seconds: float) -> None:
        """Update the estimates with the duration of a step."""
        if prompt_tokens:
            spent, tokens = self._prompts
            keep = 1 - SMOOTHING
            beyond = max(0.0, seconds - self._decode_s)
            self._prompts = keep * spent + beyond, keep * tokens + prompt_tokens
        elif self._decode_s:
            self._decode_s += SMOOTHING * (seconds - self._decode_s)
        else:
            self._decode_s = seconds

    @property
    def _token_s(self) -> float:
        seconds, tokens = self._prompts
        return max(seconds / tokens, 1e-9)

    def _slack_s(self, req: Req, now: float) -> float:
        request = req.request
        target = request.ttft_ms if isinstance(request, GenerateRequest) else None
        due = req.arrived_s + (DEFAULT_TTFT_MS if target is None else target) / 1e3
        return due - now - (req.num_tokens - self._cached_tokens(req)) * self._token_s

    def _spare_s(self, req: Req, now: float) -> float:
        """Seconds beyond a decode step that the next step may take with `req` still on target."""
        request, left = req.request, req.max_tokens - req.num_tokens
        if not isinstance(request, GenerateRequest) or request.tpot_ms is None:
            return inf
        if not req.first_token_s or left <= 0:
            return inf
        # ---- tokens since the last start: [0, done) known or in flight | [done, done + left) to
        # come
        done = req.num_tokens - req.prompt_len - len(request.output_ids)
        next_due = req.first_token_s + done * request.tpot_ms / 1e3
        last_due = next_due + (left - 1) * request.tpot_ms / 1e3
        to_last = (req.pending + left) * self._decode_s
        if now + BEST_CASE_FACTOR * to_last > last_due:
            return inf  # the target cannot be met
        return min(next_due - (req.pending + 1) * self._decode_s, last_due - to_last) - now


def build(context: PolicyContext) -> SchedulePolicy:
    return LeastSlack(context)
