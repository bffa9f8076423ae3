"""Executes the nodes of one program state, in order, on any available thread."""

from __future__ import annotations

import contextvars
import inspect
import logging
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sylvan.lang import ir
from sylvan.lang.backends.api import BaseBackend
from sylvan.lang.context import StateContext
from sylvan.lang.errors import ProgramCancelledError, ProgramError, SourceLine
from sylvan.lang.interpreter import Interpreter
from sylvan.lang.pool import WorkerPool
from sylvan.lang.sampling import GenParams
from sylvan.lang.signal import Ready, Signal

logger = logging.getLogger(__name__)

Item = tuple[ir.Expr, SourceLine | None]

_LANG = str(Path(__file__).parent)
_EFFECTS = (ir.Gen, ir.Select, ir.CommitLazy, ir.Variable, ir.ConcatenateAndAppend)


class StreamExecutor:
    """A queue of nodes and at most one thread that executes them: the actor of a state.

    Nodes with effects are submitted to the shared pool at once, so a program runs ahead of the
    model. A thread that waits for this state executes its nodes itself if no worker has started, so
    a full pool blocks no reader, and a program that reads each result at once needs no thread
    switch. Invariants:

    * `_draining` is True while one thread, the only one, changes `context`;
    * `_pending[name]` counts the appended nodes that have yet to set variable `name`;
    * after an error no node is executed, and all waiters get the error.

    Args:
        context: The state; owned by this executor.
        backend: Executes gens.
        defaults: Default sampling parameters of gens.
        pool: Executes the nodes; None executes them as they are appended.

    Attributes:
        variables: The variables of `context`.
        signal: Notified of every change.
        failure: The error of a failed node.
        ended: Whether the program will append no more nodes.
    """

    def __init__(
        self,
        context: StateContext,
        backend: BaseBackend,
        defaults: GenParams,
        pool: WorkerPool | None,
    ) -> None:
        self.context = context
        self.variables = context.variables
        self.backend = backend
        self.defaults = defaults
        self._pool = pool
        self._interpreter = Interpreter(context, backend, defaults, self)
        self._contextvars = contextvars.copy_context()
        self.signal = Signal()
        self._queue: deque[Item] = deque()
        self._submitted = self._done = 0
        self._pending: dict[str, int] = {}
        self._draining = self._scheduled = False
        self.ended = False
        self.failure: BaseException | None = None
        context.scope.listen(self._on_cancel)

    # Appending

    def submit(self, expr: ir.Expr) -> None:
        """Append nodes. Does not block, unless there is no pool.

        Raises:
            ProgramError: without a pool, if a node fails.
        """
        where = _program_line()
        items = [(node, where) for node in ir.flatten(expr)]
        with self.signal.lock:
            if self.failure is not None:
                return
            for node, _ in items:
                for name in _names(node):
                    self._pending[name] = self._pending.get(name, 0) + 1
            self._queue.extend(items)
            self._submitted += len(items)
            wake = self._wants_worker()
        if self._pool is None:
            self._drain(lambda: False)
            self.raise_error()
        elif wake:
            self._pool.submit(self._work)

    def _wants_worker(self) -> bool:
        """Whether to submit to the pool now; text alone can wait. Call with the lock held."""
        if self._draining or self._scheduled or self._pool is None:
            return False
        self._scheduled = any(isinstance(node, _EFFECTS) for node, _ in self._queue)
        return self._scheduled

    # Executing

    def _work(self) -> None:
        """The task of a worker."""
        with self.signal.lock:
            self._scheduled = False
        with suppress(BaseException):  # kept as the state's error; the worker continues
            self._drain(lambda: False)

    def _drain(self, enough: Ready) -> None:
        """Execute nodes on this thread, if no other does, until `enough` or none are left."""
        with self.signal.lock:
            if self._draining:
                return
            self._draining = True
        executed = False
        try:
            while (item := self._next(enough, executed=executed)) is not None:
                executed = self._run(*item)
        finally:
            with self.signal.lock:
                self._draining = False
                wake = self._wants_worker()
                self.signal.notify()
        if wake and self._pool is not None:
            self._pool.submit(self._work)

    def _next(self, enough: Ready, *, executed: bool) -> Item | None:
        """Account for an executed node, and return the next one."""
        with self.signal.lock:
            if executed:
                self._done += 1
                self.signal.notify()
            if self._queue and self.failure is None and not enough():
                return self._queue.popleft()
        return None

    def _run(self, node: ir.Expr, where: SourceLine | None) -> bool:
        """Execute one node; False if it failed."""
        try:
            self.context.scope.check()
            self._contextvars.run(self._interpreter.execute, node)
        except BaseException as error:  # any error of a backend is the program's
            self._fail(node, where, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def _fail(self, node: ir.Expr, where: SourceLine | None, error: BaseException) -> None:
        kind = ProgramError
        if isinstance(error, ProgramError):
            kind = type(error)
        elif self.context.scope.cancelled:
            kind = ProgramCancelledError  # cancelling closed the connection of the call
        text = str(error) if error.args else ""
        failed = kind(f"{node!r} failed: {type(error).__name__}: {text}", where)
        failed.__cause__ = error
        if kind is ProgramError:
            logger.warning("program failed sid=%s: %s", self.context.sid, failed)
        self.fail(failed)

    def fail(self, error: BaseException) -> None:
        """Fail the state: no further node is executed; all waiters get `error`."""
        with self.signal.lock:
            if self.failure is None:
                self.failure = error
            self._queue.clear()
            self.signal.notify()

    def end(self) -> None:
        """The program will append no more nodes."""
        with self.signal.lock:
            if self.ended:
                return
            self.ended = True
            self.signal.notify()
        self.backend.end_program(self.context)

    # Results of the interpreter (see `interpreter.Sink`)

    def publish(self, name: str) -> None:
        with self.signal.lock:
            left = self._pending.get(name, 0) - 1
            if left > 0:
                self._pending[name] = left
            else:
                self._pending.pop(name, None)
            self.signal.notify()

    def progress(self) -> None:
        with self.signal.lock:
            self.signal.notify()

    # Waiting

    def wait(self, ready: Ready, timeout: float | None = None, *, may_execute: bool = True) -> None:
        """Return when `ready()` is true, or when the state failed.

        Args:
            ready: Called with the lock held, after every change.
            timeout: Seconds; with it this thread does not execute nodes itself.
            may_execute: Whether this thread may execute nodes meanwhile.

        Raises:
            TimeoutError: not ready in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self.signal.lock:
                if self._all_done(ready):
                    return
                idle = not self._draining and bool(self._queue)
                if not (idle and may_execute and deadline is None):
                    if idle and self._needs_worker() and self._pool is not None:
                        self._pool.submit(self._work)
                    left = None if deadline is None else deadline - time.monotonic()
                    if not self.signal.wait(left) and deadline is not None:
                        raise TimeoutError(f"not ready within {timeout} s")
                    continue
            self._drain(lambda: self._all_done(ready))

    async def wait_async(self, ready: Ready) -> None:
        """Like `wait`, without blocking a thread."""
        with self.signal.lock:
            wake = bool(self._queue) and self._needs_worker()
        if wake and self._pool is not None:
            self._pool.submit(self._work)
        await self.signal.until(lambda: self._all_done(ready))

    def _all_done(self, ready: Ready) -> bool:
        return self.failure is not None or ready()

    def _needs_worker(self) -> bool:
        """Whether to submit to the pool, even for text. Call with the lock held."""
        if self._draining or self._scheduled:
            return False
        self._scheduled = True
        return True

    # Reading

    def is_set(self, name: str) -> bool:
        """Whether all appended nodes that set `name` have been executed."""
        return name not in self._pending

    def is_idle(self) -> bool:
        """Whether all appended nodes have been executed."""
        return self._done == self._submitted

    @property
    def is_finished(self) -> bool:
        """Whether the program has ended, and all its nodes were executed or one failed."""
        return self.failure is not None or (self.ended and self.is_idle())

    def raise_error(self) -> None:
        """Raise the error of the state, if it failed."""
        if self.failure is not None:
            raise self.failure

    def sync(self, timeout: float | None = None) -> None:
        """Wait for all nodes appended so far; errors stay in `failure`."""
        self.wait(self.is_idle, timeout)

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """Value of a variable.

        Raises:
            KeyError: no node sets it.
            ProgramError: the state failed before it was set.
        """
        self.wait(lambda: self.is_set(name), timeout)
        return self.read_var(name)

    def read_var(self, name: str) -> Any:
        """Value of a variable that was waited for. See `get_var`."""
        if not self.is_set(name):
            self.raise_error()
        if name not in self.context.variables:
            self.raise_error()
            raise KeyError(name)
        return self.context.variables[name]

    def fork(self, size: int) -> list[StreamExecutor]:
        """Fork the state into independent copies.

        With more than one, the backend first caches the text, so that the copies share it.

        Raises:
            ProgramError: the state failed.
        """
        if size > 1:
            self.sync()
            if self.context.text_:
                self.submit(ir.CommitLazy())
        self.sync()
        self.raise_error()
        contexts = [self.context.forked() for _ in range(size)]
        self.backend.fork_program(self.context, contexts)
        return [StreamExecutor(c, self.backend, self.defaults, self._pool) for c in contexts]

    def _on_cancel(self) -> None:
        if self._queue or self._draining or not self.ended:
            self.fail(ProgramCancelledError("the program was cancelled"))


def _names(node: ir.Expr) -> tuple[str, ...]:
    """Variables that executing `node` sets."""
    if isinstance(node, ir.Gen | ir.Select):
        return (node.name,) if node.name is not None else ()
    if isinstance(node, ir.VarScopeEnd):
        return (node.name,)
    if isinstance(node, ir.SeparateReasoning):
        names = node.names()
        return (*names, *(ir.reasoning_name(name) for name in names))
    return ()


def _program_line() -> SourceLine | None:
    """The innermost line outside of this package."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LANG):
        frame = frame.f_back
    return None if frame is None else SourceLine(frame.f_code, frame.f_lineno)
