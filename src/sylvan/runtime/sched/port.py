"""Lets capabilities finish or abandon loads, and release held memory."""

from __future__ import annotations

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.capability import Hooks
from sylvan.runtime.sched.lifecycle import Lifecycle
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.pipeline import Pipeline
from sylvan.runtime.sched.planner import Planner


class Port:
    """Implements `SchedulerPort`. Ignores late reports about requests that have changed phase.

    Args:
        requests: All requests of the scheduler.
        planner: Owns their memory.
        pipeline: Knows the steps in flight.
        lifecycle: Frees the memory of ended requests.
        hooks: Hooks of all capabilities.
    """

    def __init__(
        self,
        requests: RequestTable,
        planner: Planner,
        pipeline: Pipeline,
        lifecycle: Lifecycle,
        hooks: Hooks,
    ) -> None:
        self._requests, self._planner, self._hooks = requests, planner, hooks
        self._pipeline, self._lifecycle = pipeline, lifecycle

    @property
    def completed_step(self) -> int:
        return self._pipeline.completed_step

    def cached_tokens(self, req: Req) -> int:
        return self._planner.cached_tokens(req)

    def loaded(self, rid: str, num_computed: int) -> None:
        self._hooks.on_call("loaded", rid, num_computed)
        if req := self._requests.loading.get(rid):
            self._planner.run_loaded(req, num_computed)

    def load_failed(self, rid: str) -> None:
        self._hooks.on_call("load_failed", rid)
        if req := self._requests.loading.get(rid):
            self._restart(req)

    def release(self, rid: str) -> None:
        self._hooks.on_call("release", rid)
        if req := self._requests.held.get(rid):
            self._lifecycle.end(req)

    def expire(self, now_s: float, timeout_s: float) -> None:
        """Abandon loads that take too long, if the loader can be stopped."""
        for req in tuple(self._requests.loading.values()):
            if now_s - req.loading_since_s >= timeout_s and self._hooks.stop_loading(req):
                self._restart(req)

    def _restart(self, req: Req) -> None:
        """Discard all loaded KV, and do not load this request again."""
        req.computed = req.kv.cached if req.kv else 0
        req.may_load = False
        if not req.retractions:  # it has not started yet
            req.started_s, req.cached_tokens = 0.0, 0
        self._planner.retract(req)
