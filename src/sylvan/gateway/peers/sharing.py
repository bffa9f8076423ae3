"""Shares this process's state with the gateway's other processes, and applies theirs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sylvan.gateway.errors import QueueFullError
from sylvan.gateway.peers.channel import PeerChannel
from sylvan.gateway.peers.messages import (
    BudgetSpent,
    Message,
    PeerBatch,
    PeerLoads,
    PeerPlacement,
    WorkerChange,
)
from sylvan.gateway.placement import RequestPlacer
from sylvan.gateway.policies.api import Placement, RoutingRequest
from sylvan.gateway.security.clients import Clients
from sylvan.gateway.workers.jobs import Jobs
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

FLUSH_S = 0.005
"""Seconds that a change waits to be batched with others."""
BEAT_S = 0.5
"""Seconds between repetitions of everything that a process may have missed."""
SILENT_S = 3.0
"""Seconds of silence after which a process counts as having no requests."""
MAX_PROMPT_BYTES = 64 << 10
"""Longer prompts are truncated for the other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingParts:
    """Dependencies of sharing.

    Attributes:
        channel: Channel to the other processes.
        number: Index of this process.
        registry: The workers, whose loads are shared.
        placing: The policies, which learn other processes' placements.
        jobs: Adds and removes workers.
        clients: Tenants' budgets.
        clock: A clock that all processes of this machine share.
    """

    channel: PeerChannel
    number: int
    registry: Registry
    placing: RequestPlacer
    jobs: Jobs
    clients: Clients
    clock: Clock


class Sharing:
    """Keeps the processes of one gateway in step; belongs to one event loop.

    Nothing waits for a reply. Loads and worker changes are repeated, so a process that restarted or
    missed something catches up half a second later.
    """

    def __init__(self, parts: SharingParts) -> None:
        self._parts = parts
        self._pending: list[Message] = []
        self._changed: set[Worker] = set()
        self._flush: asyncio.TimerHandle | None = None
        self._changes: dict[str, WorkerChange] = {}
        self._versions = 0
        self._heard_s: dict[int, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start sending and receiving."""
        parts, loop = self._parts, asyncio.get_running_loop()
        parts.registry.on_load.append(self._loaded)
        parts.placing.on_place.append(self._placed)
        parts.clients.on_spend.append(self._spent)
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._beat())]

    async def close(self) -> None:
        """Stop sending and receiving."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._flush is not None:
            self._flush.cancel()
        self._parts.channel.close()

    def worker_changed(self, url: str, spec: WorkerSpec | None) -> None:
        """Share that an operator changed a worker in this process; None: removed it."""
        self._versions += 1
        change = WorkerChange(url, (self._versions, self._parts.number), spec)
        self._changes[url] = change
        self._broadcast(change)

    def _loaded(self, worker: Worker) -> None:
        self._changed.add(worker)
        self._soon()

    def _placed(self, model: str, placement: Placement, request: RoutingRequest) -> None:
        worker = placement.worker
        self._broadcast(
            PeerPlacement(
                model,
                worker.kind,
                worker.url,
                placement.branch,
                request.prompt[:MAX_PROMPT_BYTES],
                request.namespace,
                request.key,
                self._parts.clock(),
            )
        )

    def _spent(self, tenant: str, requests: int, tokens: int) -> None:
        self._broadcast(BudgetSpent(tenant, requests, tokens))

    def _broadcast(self, message: Message) -> None:
        self._pending.append(message)
        self._soon()

    def _soon(self) -> None:
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(FLUSH_S, self._send)

    def _send(self) -> None:
        self._flush = None
        messages, self._pending = self._pending, []
        if self._changed:
            messages.append(PeerLoads({worker.url: _load(worker) for worker in self._changed}))
            self._changed.clear()
        if messages:
            self._parts.channel.send(messages)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._send()
            busy = {w.url: _load(w) for w in self._parts.registry.workers if w.num_running}
            self._parts.channel.send([PeerLoads(busy, complete=True), *self._changes.values()])
            self._forget_silent()

    def _forget_silent(self) -> None:
        now = self._parts.clock()
        for process, heard_s in tuple(self._heard_s.items()):
            if now - heard_s > SILENT_S:
                del self._heard_s[process]
                for worker in self._parts.registry.workers:
                    worker.record_peer_load(process, 0, 0)

    async def _listen(self) -> None:
        while True:
            self._take(await self._parts.channel.receive())

    def _take(self, batch: PeerBatch) -> None:
        self._heard_s[batch.process] = self._parts.clock()
        for message in batch.messages:
            match message:
                case PeerPlacement():
                    self._learn(message)
                case PeerLoads():
                    self._see_loads(batch.process, message)
                case BudgetSpent():
                    clients = self._parts.clients
                    clients.add_remote_usage(message.tenant, message.requests, message.tokens)
                case WorkerChange():
                    self._follow(message)

    def _learn(self, placed: PeerPlacement) -> None:
        worker = self._parts.registry.by_url(placed.worker)
        if worker is None:
            return
        request = RoutingRequest(prompt=placed.prompt, namespace=placed.namespace, key=placed.key)
        placement = Placement(worker, 0, placed.branch)
        self._parts.placing.learn(placed.model, placement, request, placed.at_s)

    def _see_loads(self, process: int, loads: PeerLoads) -> None:
        for url, (running, queued) in loads.rows.items():
            worker = self._parts.registry.by_url(url)
            if worker is not None:
                worker.record_peer_load(process, running, queued)
        if loads.complete:
            for worker in self._parts.registry.workers:
                if worker.url not in loads.rows:
                    worker.record_peer_load(process, 0, 0)

    def _follow(self, change: WorkerChange) -> None:
        known = self._changes.get(change.url)
        if known is not None and known.version >= change.version:
            return
        self._changes[change.url] = change
        self._versions = max(self._versions, change.version[0])
        apply_change(change, self._parts.registry, self._parts.jobs)


def apply_change(change: WorkerChange, registry: Registry, jobs: Jobs) -> None:
    """Apply a change that an operator made in another process."""
    members = [worker for worker in registry.workers if worker.spec.url == change.url]
    if change.spec is None:
        for worker in members:
            jobs.remove(worker)
        jobs.cancel_url(change.url)
    elif not members:
        try:
            jobs.add(change.spec)
        except (RequestError, QueueFullError):
            return  # already being added here, or over the limit, as the other process reported
    elif members[0].spec != change.spec:
        jobs.update(members[0], change.spec)


def _load(worker: Worker) -> tuple[int, int]:
    return worker.num_running, worker.queued_tokens
