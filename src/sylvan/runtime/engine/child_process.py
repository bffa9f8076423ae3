"""One run of a child process, as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import threading
from collections.abc import Callable

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import (
    Alive,
    FromScheduler,
    Heartbeat,
    Ready,
    StartFailed,
    TextBatch,
    ToScheduler,
)
from sylvan.runtime.engine.child_main import ChildConfig
from sylvan.transport.api import AsyncReceiver, MessageSender
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

FromChild = FromScheduler | TextBatch | Alive
"""Any message from a child to its parent."""

_MESSAGES_PER_TURN = 64  # messages handled before other tasks of the event loop run
_LAST_MESSAGE_S = 0.2  # seconds that a message sent just before the exit may take


class ChildProcess:
    """A child from start to exit.

    Args:
        name: Name in logs and errors.
        process: A process that waits for a `ChildConfig` on stdin.
        receiver: Receives the child's messages; closed with it.
        sender: Sends messages to the child, if it accepts any; closed with it.
        on_message: Called with each message except `Ready` and `StartFailed`.

    Attributes:
        pid: Process ID.
        ready: Its `Ready` message; fails with ConfigError if it cannot start, or exits before.
        ended: Its exit code; negative: the signal that killed it.
        heartbeat_s: Time of its last heartbeat, initially of `Ready`; None before.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        receiver: AsyncReceiver[FromChild],
        sender: MessageSender[ToScheduler] | None,
        on_message: Callable[[FromChild], None],
        clock: Clock = monotonic,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid = process.pid
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.heartbeat_s: float | None = None
        self._process = process
        self._receiver = receiver
        self._sender = sender
        self._on_message = on_message
        self._clock = clock
        self._reader = loop.create_task(self._read())
        self._reader.add_done_callback(self._on_reader_end)
        waiter = threading.Thread(target=self._wait, args=(loop,), name=f"wait-{name}", daemon=True)
        waiter.start()

    def configure(self, config: ChildConfig) -> None:
        """Send the process its configuration; call this once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has exited, which `ended` reports
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()

    def send(self, message: ToScheduler) -> None:
        """Send a message to the child.

        Raises:
            ChannelFullError: The child's channel is full.
        """
        assert self._sender is not None, f"the {self.name} process takes no messages"
        self._sender.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still exists."""
        self._process.send_signal(number)

    async def stop(self, patience_s: float) -> None:
        """Terminate the process; kill it if it still runs after `patience_s`."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), patience_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended

    def close(self) -> None:
        """Close the pipe and the sockets of the child; idempotent."""
        self._reader.cancel()
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop was closed before
            loop.call_soon_threadsafe(self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        self.ended.set_result(code)
        # its `StartFailed` message may still be in transit
        asyncio.get_running_loop().call_later(_LAST_MESSAGE_S, self._fail_unless_ready, code)

    def _on_reader_end(self, reader: asyncio.Task[None]) -> None:
        """End a child whose messages cannot be read: it will be replaced."""
        if reader.cancelled() or (error := reader.exception()) is None:
            return
        logger.error("messages of the %s cannot be handled", self.name, exc_info=error)
        self.signal(signal.SIGKILL)

    def _fail_unless_ready(self, code: int) -> None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._fail(f"the {self.name} process ended while it was starting ({how})")

    def _fail(self, message: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(ConfigError(message))
            self.ready.exception()  # possibly unobserved

    async def _read(self) -> None:
        turn = 0
        while True:
            message = await self._receiver.receive()
            match message:
                case Ready():
                    self.heartbeat_s = self._clock()
                    if not self.ready.done():
                        self.ready.set_result(message)
                case StartFailed():
                    self._fail(message.message)
                case Alive():
                    self.heartbeat_s = self._clock()
                case Heartbeat():
                    self.heartbeat_s = self._clock()
                    self._on_message(message)
                case _:
                    self._on_message(message)
            turn += 1
            if turn % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
