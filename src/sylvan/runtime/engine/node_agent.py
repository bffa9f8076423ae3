"""Runs on each machine other than node 0: starts and ends its ranks at node 0's request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

import sylvan
from sylvan.config import Config
from sylvan.config.address import split_address
from sylvan.config.env import for_compute
from sylvan.config.tree import ServerConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.nodes import (
    AskJoin,
    EndRanks,
    JoinNode,
    NodeAlive,
    NodeRefused,
    RanksEnded,
    RanksReady,
    StartRanks,
    StopNode,
    ToHead,
    ToNode,
    Welcome,
)
from sylvan.runtime.engine.child_main import ChildConfig, StepsAddress
from sylvan.runtime.engine.child_process import ChildProcess, FromChild
from sylvan.runtime.engine.nodes import BEATS_PER_LIMIT
from sylvan.runtime.engine.process import RANK_ARGV, start_process
from sylvan.runtime.engine.watchdog import Watchdog
from sylvan.transport.api import MessageError
from sylvan.transport.arrays import SharedArrays
from sylvan.transport.codec import MessageDecoder
from sylvan.transport.hub import AsyncHubClient
from sylvan.transport.workspace import Workspace
from sylvan.transport.zmq import AsyncPullReceiver
from sylvan.utils.clock import monotonic
from sylvan.utils.names import random_hex

logger = logging.getLogger(__name__)

_ASK_S = 0.5
_SILENT_LIMITS = 5
"""Node 0 counts as lost after this many times `parallel.rank_timeout_s` without a message."""


@dataclass(slots=True)
class _Run:
    """The ranks of one start."""

    number: int
    children: list[ChildProcess]
    task: asyncio.Task[None]


class NodeAgent:
    """Serves a model together with node 0; belongs to one event loop.

    Args:
        config: Resolved configuration of this machine.
        given: Settings given by its operator; node 0 compares them with its own.
        checkpoint: Digest of the checkpoint.
        parent: Parent directory of the workspace; default: in shared memory.
    """

    def __init__(
        self, config: Config, given: dict[str, str], checkpoint: str, parent: Path | None = None
    ) -> None:
        parallel = config.parallel
        assert parallel.address is not None, "checked with the configuration"
        media = msgspec.structs.replace(config.media, encoder_key=None)
        self._config = msgspec.structs.replace(config, server=ServerConfig(), media=media)
        self._host, port = split_address(parallel.address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"tcp://{self._host}:{port}"
        self._head: AsyncHubClient[ToHead, ToNode] = AsyncHubClient(self._context, address, ToNode)
        self._workspace = Workspace.create(parent)
        self._arrays = SharedArrays(self._workspace.path)
        self._join_message = JoinNode(
            attempt="",
            node=parallel.node_rank,
            nodes=parallel.nodes,
            host=socket.gethostname(),
            version=sylvan.__version__,
            checkpoint=checkpoint,
            settings=given,
        )
        first = parallel.node_rank * parallel.ranks_per_node
        self.ranks = range(first, first + parallel.ranks_per_node)
        self._run: _Run | None = None
        self._num_started = 0

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running ranks."""
        children = self._run.children if self._run is not None else ()
        return {child.name: child.pid for child in children}

    async def run(self) -> None:
        """Serve until node 0 stops.

        Raises:
            ConfigError: Node 0 does not answer within `parallel.join_timeout_s`, or refuses this
                machine; the message says why.
        """
        beats = asyncio.get_running_loop().create_task(self._beat())
        try:
            while True:
                await self._join()
                if not await self._follow():
                    return
        finally:
            beats.cancel()
            await self._end()
            self._head.close()
            self._context.destroy(linger=0)
            self._workspace.remove()

    async def _join(self) -> None:
        parallel = self._config.parallel
        until = monotonic() + parallel.join_timeout_s
        message = msgspec.structs.replace(self._join_message, attempt=random_hex(8))
        while monotonic() < until:
            self._head.send(message)
            with contextlib.suppress(TimeoutError):
                match await asyncio.wait_for(self._receive(), _ASK_S):
                    case Welcome():
                        logger.info("node %d has joined node 0", parallel.node_rank)
                        return
                    case NodeRefused(reason=reason):
                        raise ConfigError(reason)
                    case _:  # sent before this attempt
                        pass
        raise ConfigError(
            f"node 0 at {parallel.address} did not answer within {parallel.join_timeout_s:g} s; "
            "start it, or correct parallel.address"
        )

    async def _follow(self) -> bool:
        """Follow node 0 until it stops (returns False) or is lost (True)."""
        silent_s = _SILENT_LIMITS * self._config.parallel.rank_timeout_s
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), silent_s)
            except TimeoutError:
                logger.warning("no message from node 0 for %g s; ending the ranks", silent_s)
                await self._end()
                return True
            match message:
                case StartRanks():
                    await self._end()
                    self._start(message)
                case EndRanks(run=run):
                    if self._run is not None and self._run.number == run:
                        await self._end()
                case AskJoin():
                    await self._end()
                    return True
                case StopNode():
                    return False
                case _:
                    pass

    async def _receive(self) -> ToNode:
        while True:
            try:
                return await self._head.receive()
            except MessageError as error:
                logger.warning("dropped a malformed message of node 0: %s", error)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.parallel.rank_timeout_s / BEATS_PER_LIMIT)
            if self._run is not None:
                self._head.send(NodeAlive())

    # ---- ranks

    def _start(self, start: StartRanks) -> None:
        children = [self._spawn(rank, start) for rank in self.ranks]
        loop = asyncio.get_running_loop()
        self._run = _Run(start.run, children, loop.create_task(self._keep(start.run, children)))

    def _spawn(self, rank: int, start: StartRanks) -> ChildProcess:
        self._num_started += 1
        outbox, name = f"out-{self._num_started}", f"rank-{rank}"
        decoder: MessageDecoder[FromChild] = MessageDecoder(FromChild, self._arrays)
        receiver = AsyncPullReceiver(self._context, [self._workspace.address(outbox)], decoder)
        process = start_process(RANK_ARGV, for_compute())
        child = ChildProcess(name, process, receiver, None, _ignore)
        child.configure(
            ChildConfig(
                config=self._config,
                workspace=str(self._workspace.path),
                parent_pid=os.getpid(),
                sockets={"replies": outbox},
                rank=rank,
                steps=StepsAddress(
                    address=f"tcp://{self._host}:{start.port}", token=start.tokens.get(rank, "")
                ),
            )
        )
        return child

    async def _keep(self, run: int, children: list[ChildProcess]) -> None:
        """Report to node 0 that the ranks are ready; when one ends, end the others and report."""
        watching = asyncio.get_running_loop().create_task(self._watch(children))
        reason = ""
        try:
            await asyncio.gather(*(child.ready for child in children))
        except ConfigError as error:
            reason = str(error)
        else:
            self._head.send(RanksReady(run))
        ended = [child.ended for child in children]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        code = next(each.result() for each in ended if each.done())
        for child in children:
            child.signal(signal.SIGKILL)
        await asyncio.wait(ended)
        watching.cancel()
        for child in children:
            child.close()
            self._workspace.sweep_arrays(child.pid)
        logger.warning("the ranks of this machine have ended (%d)", code)
        self._head.send(RanksEnded(run, code, reason))

    async def _watch(self, children: list[ChildProcess]) -> None:
        """End a rank that hangs."""
        watchdogs = [Watchdog(self._config.parallel.rank_timeout_s) for _ in children]
        while True:
            await asyncio.sleep(watchdogs[0].interval_s)
            for child, watchdog in zip(children, watchdogs, strict=True):
                if watchdog.hangs(child.heartbeat_s) and not child.ended.done():
                    logger.error("%s hangs; killing it pid=%d", child.name, child.pid)
                    child.signal(signal.SIGKILL)

    async def _end(self) -> None:
        """End the ranks and wait until they have."""
        run, self._run = self._run, None
        if run is None:
            return
        for child in run.children:
            child.signal(signal.SIGKILL)
        await asyncio.wait([run.task])


def _ignore(message: FromChild) -> None:
    """Ranks only send heartbeats."""
