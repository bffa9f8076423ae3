"""Owns the scheduler and detokenizer processes: starts them, restarts them, ends them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any, cast

import msgspec
import zmq

from sylvan.config import Config
from sylvan.config.tree import ServerConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Loading, TextBatch, ToScheduler
from sylvan.protocol.shared_params import ParamsSender
from sylvan.runtime.engine.child import Launch
from sylvan.runtime.engine.composition import Scalar
from sylvan.runtime.engine.life import Backoff, FromChild, Life
from sylvan.runtime.engine.process import (
    DETOKENIZER,
    SCHEDULER,
    EarlyScheduler,
    start_process,
)
from sylvan.runtime.engine.progress import Progress
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import ModelFacts
from sylvan.transport.arrays import SharedArrays
from sylvan.transport.codec import Decoder, Encoder
from sylvan.transport.workspace import Workspace
from sylvan.transport.zmq import AsyncPullReceiver, AsyncPushSender

logger = logging.getLogger(__name__)

Meanwhile = Callable[[], Awaitable[object]]
"""What a process does while others start."""

HANG_S = 300.0
"""A scheduler without a sign of life for so long is ended and started anew."""
STOP_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Command lines of the children."""

    scheduler: tuple[str, ...] = SCHEDULER
    detokenizer: tuple[str, ...] = DETOKENIZER


class Supervisor:
    """The children of an API process; belongs to its event loop.

    Each life of a child has sockets of its own towards the parent, so that nothing meant for a
    dead process reaches its successor. The sockets between the children keep their names; what
    is left in them belongs to an earlier epoch, which both sides ignore.
    """

    def __init__(
        self,
        config: Config,
        programs: Programs | None = None,
        parent: Path | None = None,
        progress: Progress | None = None,
        early: EarlyScheduler | None = None,
    ) -> None:
        # secrets never leave this process
        self._config = msgspec.structs.replace(config, server=ServerConfig())
        self._programs = programs or Programs()
        self._workspace = Workspace.create(parent)
        self._arrays = SharedArrays(self._workspace.path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = itertools.count(1)
        self._lives: dict[str, Life] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._manager: TokenizerManager | None = None
        self._scheduler_sender: AsyncPushSender[ToScheduler] | None = None
        self._progress = progress  # of the first start; later ones are told by the log
        self._early = early
        self._closed = False

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children, by role."""
        return {role: life.pid for role, life in self._lives.items()}

    @property
    def workspace(self) -> Path:
        """Directory of sockets and shared arrays."""
        return self._workspace.path

    async def spawn(self, meanwhile: Meanwhile | None = None) -> None:
        """Start both children; `run` waits for them.

        Args:
            meanwhile: What this process has to do. The scheduler, whose imports take longest, has a
                core for itself where there are two; this and the detokenizer share the other.
        """
        self._scheduler_sender = self._spawn_scheduler()
        if meanwhile is not None:
            await meanwhile()
        self._spawn_detokenizer()

    async def run(
        self, manager: TokenizerManager, facts_of: Callable[[Mapping[str, Scalar]], ModelFacts]
    ) -> None:
        """Wait until both children are ready, connect the manager, and keep them from now on.

        Raises:
            ConfigError: one of them cannot start; says why.
        """
        self._manager = manager
        self._facts_of = facts_of
        lives = tuple(self._lives.values())
        readies = await asyncio.gather(*(life.ready for life in lives))
        self._progress = None
        facts = dict(zip(self._lives, readies, strict=True))["scheduler"].facts
        manager.line.connect(ParamsSender(self._sender().send).send, facts_of(facts))
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._keep_scheduler()),
            loop.create_task(self._keep_detokenizer()),
            loop.create_task(self._watch_for_hangs()),
        ]

    async def close(self) -> None:
        """End the children and remove what they used; idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(life.stop(STOP_PATIENCE_S) for life in self._lives.values()))
        self._release()

    def kill(self) -> None:
        """End the children at once and remove what they used."""
        self._closed = True
        for life in self._lives.values():
            life.signal(signal.SIGKILL)
        self._release()

    def _sender(self) -> AsyncPushSender[ToScheduler]:
        assert self._scheduler_sender is not None
        return self._scheduler_sender

    def _release(self) -> None:
        for life in self._lives.values():
            life.close()
        if self._scheduler_sender is not None:
            self._scheduler_sender.close()
        self._context.destroy(linger=0)
        self._workspace.remove()

    def _spawn_scheduler(self) -> AsyncPushSender[ToScheduler]:
        number = next(self._numbers)
        inbox = f"scheduler-{number}"
        sockets = {"inbox": inbox, "stops": "stops", "text": "text", "replies": f"api-{number}"}
        process = self._early.take() if self._early else None
        process = process or start_process(self._programs.scheduler)
        self._spawn("scheduler", process, sockets, "replies")
        address = self._workspace.address(inbox)
        return AsyncPushSender(self._context, address, Encoder(self._arrays))

    def _spawn_detokenizer(self) -> None:
        sockets = {"inbox": "text", "stops": "stops", "texts": f"api-{next(self._numbers)}"}
        process = start_process(self._programs.detokenizer)
        self._spawn("detokenizer", process, sockets, "texts")

    def _spawn(self, role: str, process: Popen[bytes], sockets: dict[str, str], ours: str) -> None:
        decoder: Decoder[FromChild] = Decoder(FromChild, self._arrays)
        address = self._workspace.address(sockets[ours])
        receiver = AsyncPullReceiver(self._context, [address], decoder)
        launch = Launch(
            config=self._config,
            workspace=str(self._workspace.path),
            parent_pid=os.getpid(),
            sockets=sockets,
            tells_loading=self._progress is not None,
        )
        self._lives[role] = Life(role, process, launch, receiver, self._deliver)

    def _deliver(self, message: FromChild) -> None:
        if isinstance(message, Loading):
            if self._progress is not None:
                self._progress(message.done, message.total)
            return
        if self._manager is None:
            return
        if isinstance(message, TextBatch):
            self._manager.line.on_texts(message)
        else:
            self._manager.line.on_reply(message)

    async def _keep_scheduler(self) -> None:
        manager = cast(TokenizerManager, self._manager)
        backoff = Backoff()
        while await self._died("scheduler"):
            manager.line.disconnect("recovering")
            self._sender().close()
            if not await self._wait_before_restart("scheduler", backoff):
                manager.line.disconnect("lost")
                return
            self._scheduler_sender = self._spawn_scheduler()
            life = self._lives["scheduler"]
            with contextlib.suppress(ConfigError):  # its end is what the loop waits for next
                ready = await life.ready
                manager.line.connect(
                    ParamsSender(self._sender().send).send, self._facts_of(ready.facts)
                )
                logger.warning("scheduler restarted pid=%d", life.pid)

    async def _keep_detokenizer(self) -> None:
        manager = cast(TokenizerManager, self._manager)
        backoff = Backoff()
        while await self._died("detokenizer"):
            manager.line.interrupt()
            if not await self._wait_before_restart("detokenizer", backoff):
                manager.line.disconnect("lost")
                return
            self._spawn_detokenizer()
            life = self._lives["detokenizer"]
            with contextlib.suppress(ConfigError):
                await life.ready
                manager.line.reconnect()
                logger.warning("detokenizer restarted pid=%d", life.pid)

    async def _died(self, role: str) -> bool:
        """Wait for the end of a child."""
        life = self._lives[role]
        code = await asyncio.shield(life.ended)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        logger.error("%s died (%s) pid=%d", role, how, life.pid)
        life.close()
        self._workspace.sweep_arrays(life.pid)
        return True

    async def _wait_before_restart(self, role: str, backoff: Backoff) -> bool:
        delay_s = backoff.next_delay_s()
        if delay_s is None:
            logger.error("%s died too often; it is not started again", role)
            return False
        await asyncio.sleep(delay_s)
        return True

    async def _watch_for_hangs(self) -> None:
        manager = cast(Any, self._manager)
        while True:
            await asyncio.sleep(HANG_S / 10)
            if manager.state == "up" and manager.heartbeat_age_s() > HANG_S:
                life = self._lives["scheduler"]
                logger.error("scheduler hangs; it is ended, its stacks follow pid=%d", life.pid)
                life.signal(signal.SIGUSR1)
                await asyncio.sleep(1.0)
                life.signal(signal.SIGKILL)
                await asyncio.shield(life.ended)
