"""Writes files for later starts while the server already serves."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

_NICE = 10
"""Niceness of the writing thread, so that steps run first."""
_PATIENCE_S = 2.0
"""Time that a stopping server waits for the writes."""

Job = Callable[[Callable[[], bool]], None]
"""Called with a function that says whether to stop; handles its own errors."""


class BackgroundWrites:
    """Runs jobs one after another in a thread. Call `wait` before changing what they read."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sylvan-load-cache", _give_way)  # starts with a job
        self._jobs: list[Future[None]] = []
        self._ended = threading.Event()

    def add(self, job: Job) -> None:
        """Run `job` after the others."""
        self._jobs.append(self._thread.submit(job, self._ended.is_set))

    def wait(self) -> None:
        """Wait until all jobs are done."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def close(self) -> None:
        """Finish the jobs, or stop them after a moment, so that a stopping server does not hang."""
        wait(self._jobs, _PATIENCE_S)
        self._ended.set()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _give_way() -> None:
    """Lower the priority of this thread alone, where the system can do that."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
