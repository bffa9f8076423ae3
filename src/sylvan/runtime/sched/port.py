"""What capabilities may do to requests: finish or give up their loading, and free held memory."""

from __future__ import annotations

from collections.abc import Callable

from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.capability import Hooks
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.planner import Planner


class Port:
    """Implements `SchedulerPort`. Reports about requests in another phase come too late: ignored.

    Args:
        requests: All requests of the scheduler.
        planner: Owns their memory.
        hooks: Of all capabilities.
        end: Gives back the memory of a request that has ended.
        timeout_s: How long a request may be loading.
    """

    def __init__(
        self,
        requests: RequestTable,
        planner: Planner,
        hooks: Hooks,
        end: Callable[[Req], None],
        timeout_s: float,
    ) -> None:
        self._requests, self._planner, self._hooks = requests, planner, hooks
        self._end, self._timeout_s = end, timeout_s

    def loaded(self, rid: str, num_computed: int) -> None:
        """See `SchedulerPort.loaded`."""
        self._hooks.on_call("loaded", rid, num_computed)
        if req := self._requests.loading.get(rid):
            self._planner.run_loaded(req, num_computed)

    def load_failed(self, rid: str) -> None:
        """See `SchedulerPort.load_failed`."""
        self._hooks.on_call("load_failed", rid)
        if req := self._requests.loading.get(rid):
            self._restart(req)

    def release(self, rid: str) -> None:
        """See `SchedulerPort.release`."""
        self._hooks.on_call("release", rid)
        if req := self._requests.held.get(rid):
            self._end(req)

    def expire(self, now_s: float) -> None:
        """Give up on loads that take too long, where what fills the memory can be stopped."""
        for req in tuple(self._requests.loading.values()):
            if now_s - req.loading_since_s >= self._timeout_s and self._hooks.stop_loading(req):
                self._restart(req)

    def _restart(self, req: Req) -> None:
        """Nothing that was loaded counts, and it is not loaded again."""
        req.computed = req.kv.cached if req.kv else 0
        req.may_load = False
        self._planner.retract(req)
