"""The pool of compile processes, as seen by the scheduler: orders in, futures out."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from sylvan.config.env import without_settings
from sylvan.runtime.features.grammar.wire import Prepare, frame, read_frame
from sylvan.runtime.features.grammar.work import CompileResult

logger = logging.getLogger(__name__)

PROGRAM = "sylvan.runtime.features.grammar.compiler.process"
NICENESS = 10
"""Nice level of the processes: decoding goes first."""


class CompileOrder(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    """Compile this grammar."""

    id: int
    kind: str
    text: str
    exact: bool = False


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Cancel an order: no request waits for it."""

    id: int


Order = Prepare | CompileOrder | Cancel


class PoolLostError(Exception):
    """The processes exited before the grammar was compiled."""


def pack(message: Order | CompileResult) -> bytes:
    """Encode a message with its length prefix."""
    return frame(msgspec.msgpack.encode(message))


class CompilePool:
    """Starts the compile process with the first order, and again after it was lost.

    The process forks a child per grammar (`process`), up to the limit on concurrency.
    Orders come from one thread, which may block until the process listens; futures complete
    in another thread.

    Args:
        prepare: First message to the process; called when one is started.
    """

    def __init__(self, prepare: Callable[[], Prepare]) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._pipe = threading.Lock()  # held while writing to the process, or closing what it reads
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._futures: dict[int, Future[CompileResult]] = {}
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """PID of the process; None: none runs."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, order: CompileOrder) -> Future[CompileResult]:
        """Order a compilation; the future fails with `PoolLostError` if the process exits."""
        future: Future[CompileResult] = Future()
        with self._lock:
            self._futures[order.id] = future
        process = self._process or self._start()
        if process is not None:
            self._write(process, order)
        if process is None or self._process is not process:  # its reader may have missed the order
            self._fail_orders([order.id])
        return future

    def cancel(self, order_id: int) -> None:
        """Cancel an order."""
        with self._lock:
            known = self._futures.pop(order_id, None)
        process = self._process
        if known is not None and process is not None:
            self._write(process, Cancel(id=order_id))

    def close(self) -> None:
        """Stop the process and its children; orders are lost from now on."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            _kill(process)
            process.wait()
        self._fail_orders(list(self._futures))

    def _start(self) -> subprocess.Popen[bytes] | None:
        prepare = self._prepare()
        with self._lock:
            if self._closed:
                return None
            try:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env=without_settings(),
                    process_group=0,
                )
            except OSError as error:
                logger.warning("the grammar compiler cannot be started: %s", error)
                return None
        self.starts += 1
        reader = threading.Thread(
            target=self._read, args=(process,), name="sylvan-grammar-results", daemon=True
        )
        reader.start()  # inherits the low priority of the starting thread
        self._write(process, prepare)
        return process

    def _write(self, process: subprocess.Popen[bytes], order: Order) -> None:
        """Send an order; if the process has exited, its reader reports that."""
        assert process.stdin is not None
        with self._pipe, contextlib.suppress(OSError, ValueError):
            view = memoryview(pack(order))
            while view:
                view = view[process.stdin.write(view) :]

    # ---- in a thread for each process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            while (body := read_frame(process.stdout)) is not None:
                result = msgspec.msgpack.decode(body, type=CompileResult)
                with self._lock:
                    future = self._futures.pop(result.id, None)
                if future is not None:  # otherwise it was cancelled
                    future.set_result(result)
        with self._lock:
            was_ours = self._process is process
            if was_ours:
                self._process = None
            lost = list(self._futures) if was_ours else []
        _kill(process)  # remaining children
        code = process.wait()
        assert process.stdin is not None
        with self._pipe:
            process.stdin.close()
        if was_ours:
            logger.error("the grammar compiler exited with code %s", code)
        self._fail_orders(lost)

    def _fail_orders(self, order_ids: list[int]) -> None:
        with self._lock:
            found = [self._futures.pop(order_id, None) for order_id in order_ids]
        for future in found:
            if future is not None:
                future.set_exception(PoolLostError())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, unless its PID may have been reused."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        logger.debug("the compiler of grammars had ended")
