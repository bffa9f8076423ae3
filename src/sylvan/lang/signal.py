"""Waits for changes of a state, from threads and event loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Ready = Callable[[], bool]


class Signal:
    """A reentrant lock, and a condition for all that wait on the state it guards."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)
        self._watchers: list[Callable[[], None]] = []

    def notify(self) -> None:
        """Wake all waiters; call with the lock held."""
        self._condition.notify_all()
        for watcher in self._watchers:
            watcher()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for `notify`; the lock is released meanwhile. False on timeout."""
        return self._condition.wait(timeout_s)

    def check(self, ready: Ready) -> bool:
        """Evaluate `ready` with the lock held."""
        with self._condition:
            return ready()

    async def until(self, ready: Ready) -> None:
        """Return when `ready()` is true, without blocking a thread."""
        import asyncio  # slow to import, and rarely needed

        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._watched_by(wake):
            while not self.check(ready):
                await changed.wait()
                changed.clear()

    @contextmanager
    def _watched_by(self, watcher: Callable[[], None]) -> Iterator[None]:
        with self._condition:
            self._watchers.append(watcher)
        try:
            yield
        finally:
            with self._condition:
                self._watchers.remove(watcher)
