"""Runs batches in this process, beside the scheduler or in its turn."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.core.req import Batch, StepResult
from sylvan.runtime.executor.api import ExecutorCaps, Pending
from sylvan.runtime.executor.plan import Planner, StepPlan
from sylvan.runtime.executor.worker import Worker


class LocalExecutor:
    """One worker. With `overlap` steps run in a thread of their own, one after another.

    The batch is copied into a plan before `launch` returns, so the scheduler may change its
    objects at once.
    """

    def __init__(self, worker: Worker, caps: ExecutorCaps, *, overlap: bool) -> None:
        self.caps = caps
        self._worker = worker
        self._planner = Planner(caps.max_running_reqs)
        self._waiting: deque[_Lazy] = deque()
        self._thread = ThreadPoolExecutor(1, "sylvan-step") if overlap else None

    def launch(self, batch: Batch) -> Pending:
        """See `Executor.launch`."""
        plan = self._planner.plan(batch)
        if self._thread is not None:
            return _Threaded(self._thread.submit(self._worker.execute, plan))
        step = _Lazy(self._worker, plan, self._waiting)
        self._waiting.append(step)
        return step

    def close(self) -> None:
        """See `Executor.close`."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


class _Threaded:
    """A step in the executor's thread."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def done(self) -> bool:
        """See `Pending.done`."""
        return self._future.done()

    def wait(self) -> StepResult:
        """See `Pending.wait`."""
        return self._future.result()


class _Lazy:
    """A step that runs when it is waited for, after all launched before it."""

    def __init__(self, worker: Worker, plan: StepPlan, waiting: deque[_Lazy]) -> None:
        self._worker = worker
        self._plan = plan
        self._waiting = waiting
        self._result: StepResult | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """There is nothing to wait for: `wait` itself does the work."""
        return True

    def wait(self) -> StepResult:
        """See `Pending.wait`."""
        while self._result is None and self._error is None:
            self._waiting.popleft().run()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def run(self) -> None:
        """Do the work and keep what came of it."""
        try:
            self._result = self._worker.execute(self._plan)
        except ExecutorError as error:
            self._error = error
