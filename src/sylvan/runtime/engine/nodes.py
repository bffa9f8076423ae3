"""The other machines that serve a model with node 0.

To the supervisor, a machine looks like one more process of the group of ranks: it becomes ready,
exits, is stopped, and is restarted with the others.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

import sylvan
from sylvan.config import Config
from sylvan.config.address import resolve_host, split_address
from sylvan.config.fields import get
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import RankRendezvous, Ready
from sylvan.protocol.nodes import (
    AskJoin,
    EndRanks,
    HeadAlive,
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
from sylvan.transport.api import MessageError
from sylvan.transport.hub import AsyncHub
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

BEATS_PER_LIMIT = 8
END_PATIENCE_S = 5.0
"""Seconds that a machine has to end its ranks; after that they count as ended."""
OWN_SETTINGS = (
    *("server.", "observe.", "chaos", "model", "tokenizer", "served_model_name", "threads"),
    *("processes", "load_cache", "parallel.node_rank", "parallel.address", "parallel.placement"),
)
"""Settings that may differ between machines; sections end with a dot."""


class RemoteNode:
    """The ranks of another machine in one run; to the supervisor as a `ChildProcess`.

    Attributes:
        name: For logs and errors.
        pid: 0: there is no such process here.
        ready: See `ChildProcess`.
        ended: See `ChildProcess`.
        heartbeat_s: See `ChildProcess`.
    """

    pid = 0

    def __init__(self, name: str, run: int, send: Callable[[ToNode], bool]) -> None:
        loop = asyncio.get_running_loop()
        self.name, self.run = name, run
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.heartbeat_s: float | None = None
        self.is_started = False
        self._send = send

    def send(self, message: object) -> None:
        """Not supported: requests go to the first rank."""
        raise AssertionError(f"{self.name} takes no messages")

    def signal(self, number: signal.Signals) -> None:
        """End the ranks; a machine that does not answer counts as ended.

        Stacks stay on the machine.
        """
        if self.ended.done() or number == signal.SIGUSR1:
            return
        if not self.is_started or not self._send(EndRanks(self.run)):
            self.end(-number, "")
            return
        loop = asyncio.get_running_loop()
        loop.call_later(END_PATIENCE_S, self.end, -signal.SIGKILL, "")

    async def stop(self, patience_s: float) -> None:
        """End the ranks."""
        self.signal(signal.SIGTERM)
        await asyncio.wait([self.ended], timeout=patience_s)
        self.end(-signal.SIGTERM, "")

    def close(self) -> None:
        """Do nothing: no resources are open."""

    def mark_ready(self, now_s: float) -> None:
        """Record that all of its ranks have loaded their shard."""
        self.heartbeat_s = now_s
        if not self.ready.done():
            self.ready.set_result(Ready(facts={}))

    def end(self, code: int, reason: str) -> None:
        """Record that all of its ranks have ended."""
        if not self.ready.done():
            self.ready.set_exception(ConfigError(reason or f"{self.name} ended while it started"))
            self.ready.exception()  # marks the exception as retrieved
        if not self.ended.done():
            self.ended.set_result(code)


@dataclass(slots=True)
class _NodeState:
    """State of one machine."""

    peer: bytes | None = None
    attempt: str = ""
    ranks: RemoteNode | None = None


class NodeHub:
    """Accepts the other machines, and starts and ends their ranks; belongs to one event loop.

    Args:
        config: Of node 0.
        context: ZeroMQ context of the sockets.
        checkpoint: Digest of node 0's checkpoint.

    Raises:
        ConfigError: `parallel.address` cannot be listened on.
    """

    def __init__(
        self,
        config: Config,
        context: zmq.Context[zmq.Socket[bytes]],
        checkpoint: str,
        clock: Clock = monotonic,
    ) -> None:
        parallel = config.parallel
        assert parallel.address is not None, "checked with the configuration"
        host, port = split_address(parallel.address)
        try:
            self._hub: AsyncHub[ToNode, ToHead] = AsyncHub(
                context, resolve_host(host), port, ToHead
            )
        except MessageError as error:
            raise ConfigError(
                f"parallel.address={parallel.address}: {error}; use an address of this machine "
                "(node 0) and a free port"
            ) from None
        self._config, self._clock, self._checkpoint = config, clock, checkpoint
        self._nodes = {node: _NodeState() for node in range(1, parallel.nodes)}
        self._rendezvous: tuple[int, RankRendezvous] | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._listen(), self._beat())]

    def start(self, node: int, name: str, run: int) -> RemoteNode:
        """Start the ranks of a machine, once it has joined and the first rank accepts them."""
        state, parallel = self._nodes[node], self._config.parallel
        ranks = state.ranks = RemoteNode(name, run, lambda message: self._send(state, message))
        late = (
            f"node {node} of {parallel.nodes} did not join within {parallel.join_timeout_s:g} s; "
            f"start it with --nnodes {parallel.nodes} --node-rank {node} "
            f"--dist-init-addr {parallel.address}"
        )
        loop = asyncio.get_running_loop()
        loop.call_later(parallel.join_timeout_s, _give_up, ranks, late)
        self._start_if_possible(state)
        return ranks

    def set_rendezvous(self, run: int, rendezvous: RankRendezvous) -> None:
        """Record where the first rank of a run accepts connections, and start the other ranks."""
        self._rendezvous = run, rendezvous
        for state in self._nodes.values():
            self._start_if_possible(state)

    def close(self) -> None:
        """Stop the other machines; idempotent."""
        for task in self._tasks:
            task.cancel()
        for state in self._nodes.values():
            self._send(state, StopNode())
            state.peer = None
        self._hub.close()

    # ---- inside

    def _start_if_possible(self, state: _NodeState) -> None:
        ranks = state.ranks
        if ranks is None or ranks.is_started or ranks.ended.done() or state.peer is None:
            return
        if self._rendezvous is None or self._rendezvous[0] != ranks.run:
            return
        rendezvous = self._rendezvous[1]
        start = StartRanks(run=ranks.run, port=rendezvous.port, tokens=rendezvous.tokens)
        ranks.is_started = self._send(state, start)

    def _send(self, state: _NodeState, message: ToNode) -> bool:
        """Send to a machine; False if it has not joined, or its connection is lost."""
        return state.peer is not None and self._hub.send(state.peer, message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.parallel.rank_timeout_s / BEATS_PER_LIMIT)
            for state in self._nodes.values():
                self._send(state, HeadAlive())

    async def _listen(self) -> None:
        while True:
            try:
                peer, message = await self._hub.receive()
            except MessageError as error:
                logger.warning("dropped a malformed message to %s: %s", self._address, error)
                continue
            if isinstance(message, JoinNode):
                self._join(peer, message)
                continue
            state = next((p for p in self._nodes.values() if p.peer == peer), None)
            if state is None:
                self._hub.send(peer, AskJoin())
            elif (ranks := state.ranks) is not None:
                self._on_message(ranks, message)

    def _on_message(self, ranks: RemoteNode, message: ToHead) -> None:
        match message:
            case RanksReady(run=run) if run == ranks.run:
                ranks.mark_ready(self._clock())
            case RanksEnded(run=run, code=code, reason=reason) if run == ranks.run:
                ranks.end(code, reason)
            case NodeAlive() if ranks.ready.done():
                ranks.heartbeat_s = self._clock()
            case _:
                pass

    def _join(self, peer: bytes, asked: JoinNode) -> None:
        why = self._reason_to_refuse(asked)
        state = self._nodes.get(asked.node)
        if why or state is None:
            logger.warning("%s, node %d, cannot join: %s", asked.host, asked.node, why)
            self._hub.send(peer, NodeRefused(why))
            if state is not None and state.ranks is not None and not state.ranks.is_started:
                state.ranks.end(1, why)
            return
        if state.attempt == asked.attempt:
            return
        state.peer, state.attempt = peer, asked.attempt
        if state.ranks is not None and state.ranks.is_started:
            state.ranks.end(1, f"node {asked.node} was restarted")
        self._send(state, Welcome())
        logger.info("node %d has joined: %s", asked.node, asked.host)
        self._start_if_possible(state)

    def _reason_to_refuse(self, asked: JoinNode) -> str:
        """Return why a machine cannot join; empty if it can."""
        nodes, node = self._config.parallel.nodes, asked.node
        differing = _differing(self._config, asked.settings)
        reasons = (
            (
                asked.nodes != nodes,
                f"node {node} is configured for {asked.nodes} machines, node 0 for {nodes}; give "
                "all of them the same --nnodes",
            ),
            (
                node not in self._nodes,
                f"there is no node {node} of {nodes}; --node-rank numbers them from 0",
            ),
            (
                asked.version != sylvan.__version__,
                f"node {node} has Sylvan {asked.version}, node 0 {sylvan.__version__}; install the "
                "same version on all machines",
            ),
            (
                bool(differing),
                f"node {node} has {differing}; start all machines with the same settings",
            ),
            (
                asked.checkpoint != self._checkpoint,
                f"node {node} has another checkpoint than node 0 at {self._config.model}; copy "
                "the model again",
            ),
        )
        return next((why for broken, why in reasons if broken), "")

    @property
    def _address(self) -> str | None:
        return self._config.parallel.address


def _give_up(ranks: RemoteNode, why: str) -> None:
    if not ranks.is_started:
        ranks.end(1, why)


def given_settings(config: Config, given: Collection[str]) -> dict[str, str]:
    """Return the given settings that must be equal on all machines."""
    return {path: _text(get(config, path)) for path in given if not _is_own(path)}


def _differing(config: Config, settings: Mapping[str, str]) -> str:
    """Describe the first setting that differs from `config`; empty if none does."""
    for path, text in settings.items():
        if _is_own(path):
            continue
        try:
            here = _text(get(config, path))
        except (AttributeError, KeyError):
            return f"a setting {path!r} that node 0 does not know"
        if here != text:
            return f"{path}={text}, node 0 {path}={here}"
    return ""


def _is_own(path: str) -> bool:
    return any(
        path == own or path.startswith(own if own.endswith(".") else f"{own}.")
        for own in OWN_SETTINGS
    )


def _text(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return "on"
    return str(value).lower() if isinstance(value, bool) else str(value)
