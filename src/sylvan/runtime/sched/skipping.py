"""Skips many plain decode steps at once, for simulations that only count them."""

from __future__ import annotations

from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.executor.api import Pending
from sylvan.runtime.sched.lifecycle import Lifecycle
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.pipeline import Pipeline
from sylvan.runtime.sched.planner import Planner


class Skipping:
    """Equivalent to a number of `step` calls, except for page numbers.

    Call it between two steps, with one step in flight, while all requests decode. The executor must
    not read page tables, because it does not receive those of skipped steps.

    Args:
        requests: All requests of the scheduler.
        planner: Plans their steps.
        pipeline: Has the step in flight.
        lifecycle: Tracks ended requests.
        cache: Their memory.
        allowed: Whether no observer needs single steps or tokens.
    """

    def __init__(
        self,
        requests: RequestTable,
        planner: Planner,
        pipeline: Pipeline,
        lifecycle: Lifecycle,
        cache: KVMemory,
        *,
        allowed: bool,
    ) -> None:
        self._requests, self._planner, self._pipeline = requests, planner, pipeline
        self._lifecycle, self._cache, self._allowed = lifecycle, cache, allowed

    def steps(self, limit: int) -> int:
        """Number of steps, at most `limit`, that can be skipped: none of them ends or emits."""
        requests, lifecycle = self._requests, self._lifecycle
        if not self._allowed or not requests.running or len(requests.waiting):
            return 0
        if len(requests) != len(requests.running) or lifecycle.has_ended or lifecycle.outbox:
            return 0
        batch = self._pipeline.decoding
        if batch is None or len(batch.slices) != len(requests.running):
            return 0
        for req in requests.running:
            known = req.tokens.length
            limit = min(limit, req.max_tokens - known - 1, req.emit_at - known - 1)
            if req.stop_ids or req.review or not req.first_token_s:
                return 0
        while limit > 0 and self._pages(limit) > self._cache.spare_pages:
            limit //= 2  # steps that evict run one by one
        return max(0, limit)

    def skip(self, steps: int, token: int, pending: Pending) -> None:
        """Skip steps, at most as many as `steps` returned.

        Args:
            steps: Their number.
            token: The token that each step samples for every request.
            pending: The result of the last one, replacing the step in flight.
        """
        for req in self._requests.running:
            assert req.kv is not None
            assert req.decode is not None
            req.tokens.repeat(token, steps)
            req.computed += steps
            req.decode.start += steps
            req.decode.stop += steps
            grown = self._cache.extend(req.kv, req.computed, computed=req.decode.start)
            assert grown, "there was memory"
        self._planner.skip(steps)
        self._pipeline.skip(steps, pending)

    def _pages(self, steps: int) -> int:
        """Pages that running requests need for that many steps."""
        size, total = self._cache.page_size, 0
        for req in self._requests.running:
            if req.kv is not None:
                total += max(0, -(-(req.computed + steps) // size) - req.kv.num_pages)
        return total
