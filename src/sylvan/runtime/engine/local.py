"""A replica without processes: scheduler and detokenizer share one thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from sylvan.config import Config
from sylvan.protocol.messages import (
    Control,
    FromScheduler,
    Shutdown,
    StopFound,
    TextBatch,
    ToDetokenizer,
    ToScheduler,
)
from sylvan.protocol.steps import StepRecord, read_steps
from sylvan.runtime.engine.detokenizer_loop import DetokenizerLoop, TextPorts
from sylvan.runtime.engine.engine_core import Build, EngineCore
from sylvan.runtime.engine.roles import Replica
from sylvan.runtime.engine.scheduler_loop import Ports, SchedulerLoop
from sylvan.runtime.tokenizer.detokenizer import DetokenizerManager
from sylvan.text.tokenizer import Tokenizer
from sylvan.transport.inproc import AsyncPipe, Pipe
from sylvan.utils.tasks import outcome_of

logger = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 64  # messages handled before other tasks of the event loop run


class LocalEngine:
    """The objects and messages of a replica's processes, over in-process pipes."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, build: Build, replica: Replica
    ) -> None:
        self._config, self._tokenizer, self._build = config, tokenizer, build
        self._replica = replica
        self._loop = asyncio.get_running_loop()
        # the event loop never blocks: a full pipe is an error
        self._inbox: Pipe[ToScheduler | StopFound] = Pipe(send_timeout_s=0.0)
        self._text: Pipe[ToDetokenizer] = Pipe()
        self._out: AsyncPipe[FromScheduler | TextBatch] = AsyncPipe(self._loop)
        self._built: asyncio.Future[EngineCore] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="sylvan-engine", daemon=True)
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model in the thread, then connect the replica's client.

        Raises:
            ConfigError: It cannot be served; the message says why.
        """
        self._thread.start()
        built = await self._built
        self._reader = self._loop.create_task(self._read())
        facts = self._replica.facts_of(dict(built.facts))
        self._replica.client.read_steps = self.read_steps
        self._replica.client.connect(self._inbox.send, facts)

    def read_steps(self, last: int) -> list[StepRecord]:
        """Return the last steps of the scheduler."""
        built = self._built.result() if self._built.done() else None
        return [] if built is None else read_steps(built.scheduler.times.log.buffer, last)

    async def close(self) -> None:
        """Stop the thread; idempotent."""
        if self._thread.ident is not None and self._thread.is_alive():
            self._inbox.send(Control(id=0, command=Shutdown()))
            await self._ended.wait()
            while self._thread.is_alive():  # briefly; at the interpreter's exit no pool can join it
                await asyncio.sleep(0.001)
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None
        self._close_pipes()

    def kill(self) -> None:
        """Close the pipes; the thread does not block process exit."""
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._inbox, self._text, self._out):
            pipe.close()

    def _main(self) -> None:
        ports = Ports(self._inbox, self._text, self._out)
        try:
            built = self._build(self._config, ports.emit)
        except BaseException as error:  # raised again by `start`
            self._call_in_loop(self._fail, error)
            return
        self._call_in_loop(self._set_built, built)
        scheduler = SchedulerLoop(built, ports)
        text_ports = TextPorts(self._text, self._out, self._inbox)
        detokenizer = DetokenizerLoop(DetokenizerManager(self._tokenizer), text_ports)

        def work() -> None:
            while scheduler.pump():
                while detokenizer.pump():
                    pass

        try:
            outcome = outcome_of(work)
            if outcome is not None:
                logger.error("the engine failed", exc_info=outcome)
                self._call_in_loop(self._replica.client.give_up)
        finally:
            built.close()
            self._call_in_loop(self._ended.set)

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop was closed
            self._loop.call_soon_threadsafe(call, *args)

    def _set_built(self, built: EngineCore) -> None:
        if not self._built.done():
            self._built.set_result(built)

    def _fail(self, error: BaseException) -> None:
        self._ended.set()
        if not self._built.done():
            self._built.set_exception(error)

    async def _read(self) -> None:
        client = self._replica.client
        turn = 0
        while True:
            message = await self._out.receive()
            if isinstance(message, TextBatch):
                client.on_texts(message)
            else:
                client.on_message(message)
            turn += 1
            if turn % _MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
