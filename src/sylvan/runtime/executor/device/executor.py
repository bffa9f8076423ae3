"""Runs batches on a device of this process; `launch` returns while the device still works."""

from __future__ import annotations

from sylvan.runtime.core.req import Batch
from sylvan.runtime.executor.api import ExecutorCaps, Pending
from sylvan.runtime.executor.device.worker import DeviceWorker
from sylvan.runtime.executor.plan import Planner


class DeviceExecutor:
    """Implements `Executor`. The scheduler's thread launches; no other thread is needed."""

    def __init__(self, worker: DeviceWorker, caps: ExecutorCaps) -> None:
        self.caps = caps
        self._worker = worker
        self._planner = Planner(caps.max_running_reqs)

    def launch(self, batch: Batch) -> Pending:
        """See `Executor.launch`."""
        return self._worker.launch(self._planner.plan(batch))

    def close(self) -> None:
        """See `Executor.close`; the device's memory goes with the process."""
