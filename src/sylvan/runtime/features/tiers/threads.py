"""Threads that wait for stores, without blocking process exit or each other.

Threads of `concurrent.futures` are joined at interpreter exit: one that hangs in
a store would prevent it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from sylvan.utils.tasks import outcome_of

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class Threads(Protocol):
    """Runs calls concurrently with steps."""

    def submit(self, call: Call) -> None:
        """Run a call in a thread."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Wait for submitted calls; False if they do not finish in time."""
        ...


MakeThreads = Callable[[int, str], Threads]
"""Creates a number of threads with a name."""


class DaemonThreads:
    """Runs calls in a number of daemon threads, which start with the first call."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Call) -> None:
        """Run a call in a thread; exceptions are logged."""
        with self._lock:
            while len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(call)

    def close(self, timeout_s: float) -> bool:
        """Wait for submitted calls; False if they do not finish in time."""
        until = time.monotonic() + timeout_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            outcome = outcome_of(call)
            if isinstance(outcome, Exception):
                logger.error("a call to the KV store failed", exc_info=outcome)
