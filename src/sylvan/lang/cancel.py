"""Cancellation and deadlines: a scope per program state, nested as states are forked."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sylvan.lang.errors import ProgramCancelledError, ProgramTimeoutError


class CancelScope:
    """Cancelled together with its parent; a child can be cancelled separately.

    Args:
        deadline: Monotonic time at which the scope expires; None for never.
        parent: The scope of the state that this one's state was forked from.
    """

    def __init__(self, deadline: float | None = None, parent: CancelScope | None = None) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._children: weakref.WeakSet[CancelScope] = weakref.WeakSet()
        if parent is not None:
            parent.adopt(self)

    @property
    def cancelled(self) -> bool:
        """Whether this scope or an ancestor was cancelled."""
        return self._cancelled

    def child(self) -> CancelScope:
        """A scope for a forked state."""
        return CancelScope(self.deadline, self)

    def adopt(self, child: CancelScope) -> None:
        """Cancel `child` when this scope is cancelled, or now if it was already."""
        with self._lock:
            self._children.add(child)
            cancelled = self._cancelled
        if cancelled:
            child.cancel()

    def listen(self, method: Callable[[], None]) -> None:
        """Call a bound method on cancellation, while its object is alive."""
        with self._lock:
            self._listeners.append(weakref.WeakMethod(method))

    def cancel(self) -> None:
        """Cancel this scope and its descendants; aborts calls in flight."""
        with self._lock:
            self._cancelled = True
            heard = [method for ref in self._listeners if (method := ref()) is not None]
            callbacks = [*heard, *self._callbacks.values()]
            children = list(self._children)
        for callback in callbacks:
            callback()
        for child in children:
            child.cancel()

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback`, from another thread, if the scope is cancelled in the block."""
        key = id(callback)
        with self._lock:
            self._callbacks[key] = callback
        try:
            self.check()
            yield
        finally:
            with self._lock:
                del self._callbacks[key]

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least a millisecond; None without one."""
        if self.deadline is None:
            return None
        return max(self.deadline - time.monotonic(), 1e-3)

    def check(self) -> None:
        """Raise if the scope was cancelled or has expired.

        Raises:
            ProgramCancelledError: `cancel` was called.
            ProgramTimeoutError: the deadline passed.
        """
        if self._cancelled:
            raise ProgramCancelledError("the program was cancelled")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise ProgramTimeoutError("the program's deadline passed")
