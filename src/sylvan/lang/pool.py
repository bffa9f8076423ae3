"""The threads that execute programs' nodes: shared by all programs, limited, started on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

MAX_THREADS = 256
IDLE_S = 10.0

Task = Callable[[], None]


class WorkerPool:
    """Runs tasks in order of submission on at most `max_threads` daemon threads.

    Tasks that wait for other tasks must be able to execute them (see `StreamExecutor`), or a full
    pool would deadlock. A thread without tasks ends after `idle_s`.
    """

    def __init__(self, max_threads: int = MAX_THREADS, idle_s: float = IDLE_S) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads must be at least 1, not {max_threads}")
        self.max_threads = max_threads
        self.peak_threads = 0
        self._idle_s = idle_s
        self._tasks: deque[Task] = deque()
        self._ready = threading.Condition()
        self._threads = 0
        self._idle = 0

    @property
    def num_threads(self) -> int:
        """Number of existing threads."""
        return self._threads

    def submit(self, task: Task) -> None:
        """Run `task` on a worker. It must not raise."""
        with self._ready:
            self._tasks.append(task)
            if self._idle >= len(self._tasks):
                self._ready.notify()
                return
            if self._threads == self.max_threads:
                return
            self._threads += 1
            self.peak_threads = max(self.peak_threads, self._threads)
        threading.Thread(target=self._work, name="sylvan-lang", daemon=True).start()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task()

    def _next(self) -> Task | None:
        with self._ready:
            while not self._tasks:
                self._idle += 1
                notified = self._ready.wait(self._idle_s)
                self._idle -= 1
                if not notified and not self._tasks:
                    self._threads -= 1
                    return None
            return self._tasks.popleft()
