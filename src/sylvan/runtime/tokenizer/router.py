"""Routes requests to replicas, and holds the table of live requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import msgspec

from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import Command, ControlReply, Finish, SchedulerLoad
from sylvan.runtime.tokenizer.fan_out import command_for, merged_load, merged_reply
from sylvan.runtime.tokenizer.live import LiveRequest, LiveTable
from sylvan.runtime.tokenizer.replica_policy import ReplicaPolicy, ReplicaRoundRobin
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient
from sylvan.runtime.tokenizer.types import ServedModelInfo, State
from sylvan.transport.api import ChannelFullError
from sylvan.utils.clock import Clock, monotonic

CONTROL_TIMEOUT_S = 30.0
HEARTBEAT_MAX_AGE_S = 2.0
DEADLINE_GRACE_S = 0.5
"""Seconds after its deadline at which a request is ended here, if the scheduler has not done so."""


class _Route(msgspec.Struct, frozen=True):
    """Where a live request is served; `timer` ends it after its deadline."""

    client: SchedulerClient
    timer: asyncio.TimerHandle | None


class ReplicaRouter:
    """Holds a client per replica's scheduler, and chooses one for each request.

    When a replica is given up, its requests continue on another one; while it restarts, they
    wait for it. Belongs to the event loop of the API process.

    Attributes:
        clients: By replica number.
        live: Requests that run, or whose end is unread.
        admitted: Called with each request about to be served.
        observers: Called with each closed request, whether or not its end was read.
    """

    def __init__(
        self,
        num_replicas: int = 1,
        policy: ReplicaPolicy | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.clients: tuple[SchedulerClient, ...] = tuple(
            SchedulerClient(replica, self._take_over, clock) for replica in range(num_replicas)
        )
        self.live = LiveTable()
        self.admitted: list[Callable[[LiveRequest], None]] = []
        self.observers: list[Callable[[LiveRequest], None]] = []
        self._policy = policy or ReplicaRoundRobin()
        self._clock = clock
        self._routes: dict[LiveRequest, _Route] = {}
        self._serials = itertools.count(1)
        self._emptied = asyncio.Event()
        self._draining = False
        self._closed = False

    @property
    def state(self) -> State:
        """State of all processes: up while one replica is."""
        if self._closed:
            return "stopped"
        if len(self.clients) == 1:
            only = self.clients[0].state
            return "draining" if self._draining and only != "lost" else only
        states = {client.state for client in self.clients}
        if states == {"lost"}:
            return "lost"
        if self._draining:
            return "draining"
        return next(state for state in ("up", "recovering", "starting") if state in states)

    def is_full(self, limit: int, priority: int) -> bool:
        """Whether every running replica is full: see `SchedulerClient.is_full`."""
        up = [client for client in self.clients if client.state == "up"]
        return bool(up) and all(client.is_full(limit, priority) for client in up)

    @property
    def ready(self) -> bool:
        """Whether a replica serves requests and has sent a heartbeat recently."""
        if self.state != "up":
            return False
        up = (c for c in self.clients if c.state == "up" and not c.load.paused)
        newest_s = max((client.heartbeat_s for client in up), default=float("-inf"))
        return self._clock() - newest_s < HEARTBEAT_MAX_AGE_S

    @property
    def heartbeat_s(self) -> float:
        """Time of the last heartbeat of any scheduler; minus infinity before the first."""
        return max(client.heartbeat_s for client in self.clients)

    @property
    def facts(self) -> ServedModelInfo:
        """The served model; if replicas differ, of the one with the least KV memory.

        Valid once a replica was up.
        """
        if len(self.clients) == 1 and (only := self.clients[0].facts) is not None:
            return only
        known = [client.facts for client in self.clients if client.facts is not None]
        assert known, "no scheduler has been ready yet"
        return min(known, key=lambda facts: facts.max_request_tokens)

    @property
    def weight_version(self) -> str:
        """Version label of the first replica's weights."""
        return self.clients[0].weight_version

    @property
    def load(self) -> SchedulerLoad:
        """Merged load of the schedulers at their last heartbeats."""
        return merged_load([client.load for client in self.clients])

    def open(self, live: LiveRequest) -> None:
        """Submit a new request.

        Raises:
            CapacityError: All replicas were given up, or the chosen one's channel is full (then a
                ChannelFullError); the request leaves no trace.
        """
        live.serial = next(self._serials)
        client = self._choose(live)
        timer = None
        if live.request.deadline_s is not None:
            delay_s = live.request.deadline_s + DEADLINE_GRACE_S
            timer = asyncio.get_running_loop().call_later(delay_s, self._expire, live)
        self._routes[live] = _Route(client, timer)
        live.replica = client.replica
        self.live.add(live)
        for observer in self.admitted:
            observer(live)
        try:
            client.open(live)
        except ChannelFullError:
            self._forget(live)
            raise

    def close(self, live: LiveRequest) -> None:
        """Close a request that ended or lost its reader: abort what still runs."""
        self._forget(live)
        live.closed_s = self._clock()
        for observer in self.observers:
            observer(live)

    def abort(self, live: LiveRequest, finish: Finish) -> None:
        """Abort a request; its stream yields the finish."""
        self._routes[live].client.abort(live, finish)

    async def control(self, command: Command, timeout_s: float = CONTROL_TIMEOUT_S) -> ControlReply:
        """Execute a command in all schedulers; see `merged_reply`.

        Raises:
            CapacityError: One is restarting, or did not answer in time.
        """
        replies = await self.control_each(command, timeout_s)
        return merged_reply(command, [reply for _, reply in replies])

    async def control_each(
        self, command: Command, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[tuple[SchedulerClient, ControlReply]]:
        """Execute a command in all schedulers; return the reply of each.

        Raises:
            CapacityError: One is restarting, or did not answer in time.
        """
        clients = self._usable()
        for client in clients:  # check all before sending: all execute it, or none
            client.check_connected()
        waiting = [
            client.control(command_for(command, number, len(clients)), timeout_s)
            for number, client in enumerate(clients)
        ]
        return list(zip(clients, await asyncio.gather(*waiting), strict=True))

    def drain(self) -> None:
        """Stop admitting requests."""
        self._draining = True

    async def drained(self) -> None:
        """Wait until no request is live."""
        while self.live:
            self._emptied.clear()
            await self._emptied.wait()

    def stop(self) -> None:
        """Stop everything; nothing may be opened afterwards."""
        self._closed = True
        for client in self.clients:
            client.give_up()

    def _usable(self) -> list[SchedulerClient]:
        """Return the clients of replicas that were not given up.

        Raises:
            CapacityError: There is none.
        """
        usable = [client for client in self.clients if client.state != "lost"]
        if self._closed or not usable:
            raise CapacityError(f"the engine is {self.state}")
        return usable

    def _choose(self, live: LiveRequest) -> SchedulerClient:
        if len(self.clients) == 1 and not self._closed and self.clients[0].state != "lost":
            return self.clients[0]
        usable = self._usable()
        up = [client for client in usable if client.state == "up"] or usable
        return up[self._policy.choose(live.request, up)]

    def _take_over(self, requests: Sequence[LiveRequest]) -> None:
        """Continue the requests of a given-up replica on others, or end them."""
        for live in requests:
            try:
                client = self._choose(live)
            except CapacityError as error:
                live.end(Finish(type="abort", message=str(error), status=error.status))
                continue
            self._routes[live] = _Route(client, self._routes[live].timer)
            client.adopt(live)

    def _expire(self, live: LiveRequest) -> None:
        waited_s = self._clock() - live.arrived_s
        finish = Finish(type="abort", message=f"not done after {waited_s:.1f} s", status=503)
        self._routes[live].client.end(live, finish)

    def _forget(self, live: LiveRequest) -> None:
        if not self.live.discard(live):
            return
        route = self._routes.pop(live)
        if route.timer is not None:
            route.timer.cancel()
        route.client.close(live)
        if not self.live:
            self._emptied.set()
