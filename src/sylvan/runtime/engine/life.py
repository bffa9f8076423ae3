"""One life of a child process, seen from its parent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Failed, FromScheduler, Ready, TextBatch
from sylvan.runtime.engine.child import Launch
from sylvan.transport.api import AsyncReceiver
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

FromChild = FromScheduler | TextBatch
"""Whatever a child tells its parent."""

MAX_RESTARTS = 5
WINDOW_S = 120.0
_MESSAGES_PER_TURN = 64  # before other tasks of the event loop have their turn


@dataclass(slots=True)
class Backoff:
    """How long to wait before a restart: longer each time, and in the end not at all.

    Restarts older than `WINDOW_S` are forgiven.
    """

    clock: Clock = monotonic
    _times: deque[float] = field(default_factory=deque[float])

    def next_delay_s(self) -> float | None:
        """Seconds to wait before the next restart; None: give up."""
        now = self.clock()
        while self._times and now - self._times[0] > WINDOW_S:
            self._times.popleft()
        if len(self._times) >= MAX_RESTARTS:
            return None
        self._times.append(now)
        return 0.0 if len(self._times) == 1 else 0.25 * 2.0 ** len(self._times)


class Life:
    """A child from its start to its end.

    Attributes:
        name: For people.
        pid: Of the process.
        ready: Its `Ready` message; fails with ConfigError if it says why it cannot start, or ends.
        ended: Its exit code; negative is the signal that ended it.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        launch: Launch,
        receiver: AsyncReceiver[FromChild],
        deliver: Callable[[FromChild], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._receiver = receiver
        self._deliver = deliver
        self._process = process
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()
        self._reader = loop.create_task(self._read())
        self._reader.add_done_callback(self._on_reader_end)
        waiter = threading.Thread(target=self._wait, args=(loop,), name=f"wait-{name}", daemon=True)
        waiter.start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still there."""
        self._process.send_signal(number)

    async def stop(self, patience_s: float) -> None:
        """End the process, the hard way after `patience_s`."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), patience_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended

    def close(self) -> None:
        """Let go of what belonged to it."""
        self._reader.cancel()
        self._receiver.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop has ended before
            loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self.ended.set_result(code)
        # its last words may still be on their way
        asyncio.get_running_loop().call_later(0.2, self._never_ready, code)

    def _on_reader_end(self, reader: asyncio.Task[None]) -> None:
        """A child that nobody hears is as good as lost: its end has it replaced."""
        if reader.cancelled() or (error := reader.exception()) is None:
            return
        logger.error("messages of the %s cannot be handled", self.name, exc_info=error)
        self.signal(signal.SIGKILL)

    def _never_ready(self, code: int) -> None:
        if not self.ready.done():
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._fail(f"the {self.name} process ended while it was starting ({how})")

    def _fail(self, message: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConfigError(message))
            self.ready.exception()  # not every life is waited for

    async def _read(self) -> None:
        turn = 0
        while True:
            message = await self._receiver.receive()
            if isinstance(message, Ready):
                if not self.ready.done():
                    self.ready.set_result(message)
            elif isinstance(message, Failed):
                self._fail(message.message)
            else:
                self._deliver(message)
            turn += 1
            if turn % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
