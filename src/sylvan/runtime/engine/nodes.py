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
from sylvan.transport.star import AsyncCentre
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

BEATS_PER_LIMIT = 8
END_PATIENCE_S = 5.0
"""Time limit for a machine to end its ranks; after that it is given up."""
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

    def get_ready(self, now_s: float) -> None:
        """All of its ranks have loaded their shard."""
        self.heartbeat_s = now_s
        if not self.ready.done():
            self.ready.set_result(Ready(facts={}))

    def end(self, code: int, reason: str) -> None:
        """All of its ranks have ended."""
        if not self.ready.done():
            self.ready.set_exception(ConfigError(reason or f"{self.name} ended while it started"))
            self.ready.exception()  # marks the exception as retrieved
        if not self.ended.done():
            self.ended.set_result(code)


@dataclass(slots=True)
class _Place:
    """State of one machine."""

    peer: bytes | None = None
    attempt: str = ""
    ranks: RemoteNode | None = None


class NodeHub:
    """Lets the other machines join, and starts and ends their ranks; for one event loop.

    Args:
        config: Of node 0.
        context: For sockets.
        checkpoint: Digest of the checkpoint that node 0 has.

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
            self._centre: AsyncCentre[ToNode, ToHead] = AsyncCentre(
                context, resolve_host(host), port, ToHead
            )
        except MessageError as error:
            raise ConfigError(
                f"parallel.address={parallel.address}: {error}; give an address of this machine, "
                "node 0, and a port that is free"
            ) from None
        self._config, self._clock, self._checkpoint = config, clock, checkpoint
        self._places = {node: _Place() for node in range(1, parallel.nodes)}
        self._met: tuple[int, RankRendezvous] | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work) for work in (self._listen(), self._beat())]

    def start(self, node: int, name: str, run: int) -> RemoteNode:
        """Start the ranks of a machine once it has joined and the first rank is reachable."""
        place, parallel = self._places[node], self._config.parallel
        ranks = place.ranks = RemoteNode(name, run, lambda message: self._send(place, message))
        late = (
            f"node {node} of {parallel.nodes} did not join within {parallel.join_timeout_s:g} s; "
            f"start it with --nnodes {parallel.nodes} --node-rank {node} "
            f"--dist-init-addr {parallel.address}"
        )
        loop = asyncio.get_running_loop()
        loop.call_later(parallel.join_timeout_s, _give_up, ranks, late)
        self._start_if_possible(place)
        return ranks

    def meet(self, run: int, meeting: RankRendezvous) -> None:
        """The first rank of a run accepts connections."""
        self._met = run, meeting
        for place in self._places.values():
            self._start_if_possible(place)

    def close(self) -> None:
        """Stop the other machines; idempotent."""
        for task in self._tasks:
            task.cancel()
        for place in self._places.values():
            self._send(place, StopNode())
            place.peer = None
        self._centre.close()

    # ---- inside

    def _start_if_possible(self, place: _Place) -> None:
        ranks = place.ranks
        if ranks is None or ranks.is_started or ranks.ended.done() or place.peer is None:
            return
        if self._met is None or self._met[0] != ranks.run:
            return
        meeting = self._met[1]
        start = StartRanks(run=ranks.run, port=meeting.port, tokens=meeting.tokens)
        ranks.is_started = self._send(place, start)

    def _send(self, place: _Place, message: ToNode) -> bool:
        """Send to a machine; False if it has not joined, or its connection is lost."""
        return place.peer is not None and self._centre.send(place.peer, message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.parallel.rank_timeout_s / BEATS_PER_LIMIT)
            for place in self._places.values():
                self._send(place, HeadAlive())

    async def _listen(self) -> None:
        while True:
            try:
                peer, message = await self._centre.receive()
            except MessageError as error:
                logger.warning("a message to %s is dropped: %s", self._address, error)
                continue
            if isinstance(message, JoinNode):
                self._join(peer, message)
                continue
            place = next((p for p in self._places.values() if p.peer == peer), None)
            if place is None:
                self._centre.send(peer, AskJoin())
            elif (ranks := place.ranks) is not None:
                self._on_message(ranks, message)

    def _on_message(self, ranks: RemoteNode, message: ToHead) -> None:
        match message:
            case RanksReady(run=run) if run == ranks.run:
                ranks.get_ready(self._clock())
            case RanksEnded(run=run, code=code, reason=reason) if run == ranks.run:
                ranks.end(code, reason)
            case NodeAlive() if ranks.ready.done():
                ranks.heartbeat_s = self._clock()
            case _:
                pass

    def _join(self, peer: bytes, asked: JoinNode) -> None:
        why = self._objection(asked)
        place = self._places.get(asked.node)
        if why or place is None:
            logger.warning("%s, node %d, cannot join: %s", asked.host, asked.node, why)
            self._centre.send(peer, NodeRefused(why))
            if place is not None and place.ranks is not None and not place.ranks.is_started:
                place.ranks.end(1, why)
            return
        if place.attempt == asked.attempt:
            return
        place.peer, place.attempt = peer, asked.attempt
        if place.ranks is not None and place.ranks.is_started:
            place.ranks.end(1, f"node {asked.node} was restarted")
        self._send(place, Welcome())
        logger.info("node %d has joined: %s", asked.node, asked.host)
        self._start_if_possible(place)

    def _objection(self, asked: JoinNode) -> str:
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
                node not in self._places,
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
