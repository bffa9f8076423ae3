"""Adding, changing and removing workers takes time: each is a job that can be looked at."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sylvan.config.route import BreakerConfig, WorkersConfig
from sylvan.gateway.errors import QueueFullError, UpstreamError
from sylvan.gateway.workers.registry import MAX_WORKERS, Registry
from sylvan.gateway.workers.spec import WorkerSpec
from sylvan.gateway.workers.worker import Discovered, Worker
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

logger = logging.getLogger(__name__)

JobState = Literal["pending", "processing", "succeeded", "failed"]
JobKind = Literal["add", "update", "remove"]
Discover = Callable[[WorkerSpec, float], Awaitable[Discovered]]

MAX_JOBS = 8192
PARALLEL = 64
PROBE_S = 5.0
MAX_PAUSE_S = 10.0
PAUSE_GROWTH = 1.2
DRAIN_POLL_S = 0.05


@dataclass(slots=True)
class WorkerJob:
    """One job.

    Attributes:
        kind: What is done.
        worker_id: To whom.
        url: Its address.
        state: How far it is.
        message: What is being waited for, or what went wrong.
        created_s: Seconds since 1970.
        updated_s: Likewise.
    """

    kind: JobKind
    worker_id: str
    url: str
    state: JobState
    message: str
    created_s: float
    updated_s: float

    def view(self) -> dict[str, Any]:
        """As `/workers` shows it."""
        return {
            "job_type": self.kind,
            "worker_url": self.url,
            "status": self.state,
            "message": self.message,
            "created_at": self.created_s,
            "updated_at": self.updated_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobParts:
    """What jobs work with.

    Attributes:
        registry: All workers.
        discover: Asks a new worker about itself.
        config: How long it may take to answer.
        breaker: For new workers.
        drain_s: How long a worker that is removed may finish what it has.
        clock: For durations.
        wall: Seconds since 1970.
    """

    registry: Registry
    discover: Discover
    config: WorkersConfig
    breaker: BreakerConfig
    drain_s: float
    clock: Clock
    wall: Clock


class Jobs:
    """Runs jobs, a bounded number at a time; belongs to one event loop."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._jobs: OrderedDict[str, WorkerJob] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    def get(self, worker_id: str) -> WorkerJob | None:
        """The last job of a worker."""
        return self._jobs.get(worker_id)

    @property
    def open(self) -> list[WorkerJob]:
        """Jobs that are not done."""
        return [job for job in self._jobs.values() if job.state in ("pending", "processing")]

    def add(self, spec: WorkerSpec) -> str:
        """Have a worker added once it answers; returns its id.

        Raises:
            RequestError: There is such a worker, or it is being added (409).
            QueueFullError: There are too many.
        """
        if self._parts.registry.by_url(spec.url) or self._parts.registry.by_url(f"{spec.url}@0"):
            raise RequestError(f"There is a worker at {spec.url}.", param="url", status=409)
        if any(job.url == spec.url for job in self.open):
            raise RequestError(f"{spec.url} is being added.", param="url", status=409)
        if len(self._parts.registry) + len(self.open) >= MAX_WORKERS:
            raise QueueFullError(f"There are {MAX_WORKERS} workers; no more can be added.")
        worker = Worker(spec, self._parts.clock, self._parts.breaker)
        self._start("add", worker, self._add(worker))
        return worker.id

    def update(self, worker: Worker, spec: WorkerSpec) -> None:
        """Have what is said about a worker changed."""
        self._start("update", worker, self._update(worker, spec))

    def remove(self, worker: Worker) -> None:
        """Have a worker removed once it has finished what it has."""
        worker.drain()
        self._start("remove", worker, self._remove(worker))

    def cancel(self, worker_id: str) -> bool:
        """Give up adding a worker; returns whether that was being done."""
        task, job = self._tasks.get(worker_id), self._jobs.get(worker_id)
        if task is None or job is None or job.kind != "add":
            return False
        task.cancel()
        self._set(job, "failed", "cancelled")
        return True

    def cancel_url(self, url: str) -> None:
        """Give up adding the worker at an address."""
        for job in self.open:
            if job.url == url:
                self.cancel(job.worker_id)

    async def settled(self) -> None:
        """Wait until no job is open."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Give up all jobs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, kind: JobKind, worker: Worker, work: Coroutine[Any, Any, None]) -> None:
        now = self._parts.wall()
        job = WorkerJob(kind, worker.id, worker.spec.url, "pending", "", now, now)
        self._jobs.pop(worker.id, None)
        self._jobs[worker.id] = job
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._run(job, work))
        self._tasks[worker.id] = task
        task.add_done_callback(lambda done: self._done(worker.id, done))

    def _done(self, worker_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(worker_id) is task:
            del self._tasks[worker_id]

    async def _run(self, job: WorkerJob, work: Coroutine[Any, Any, None]) -> None:
        async with self._slots:
            self._set(job, "processing", "")
            try:
                await work
            except UpstreamError as error:
                logger.warning("worker job failed url=%s: %s", job.url, error)
                self._set(job, "failed", str(error))
            else:
                self._set(job, "succeeded", "")

    def _set(self, job: WorkerJob, state: JobState, message: str) -> None:
        job.state, job.message = state, message
        job.updated_s = self._parts.wall()

    async def _add(self, worker: Worker) -> None:
        parts, spec = self._parts, worker.spec
        found = await self._reached(worker)
        ranks = range(found.dp_size) if spec.dp_aware else (None,)
        for rank in ranks:
            if rank in (None, 0):
                member = worker
                member.dp_rank = rank
            else:
                member = Worker(spec, parts.clock, parts.breaker, dp_rank=rank)
            member.found = found
            member.health.healthy = True
            parts.registry.add(member)
            logger.info("worker added url=%s models=%s", member.url, ",".join(member.models))

    async def _reached(self, worker: Worker) -> Discovered:
        """What a worker says, as soon as it answers.

        Raises:
            UpstreamError: It did not, in time or in so many attempts.
        """
        config, spec = self._parts.config, worker.spec
        deadline = self._parts.clock() + config.startup_timeout_s
        pause_s, attempts = config.startup_interval_s, 0
        while True:
            attempts += 1
            try:
                return await self._parts.discover(spec, PROBE_S)
            except UpstreamError as error:
                left_s = deadline - self._parts.clock()
                if attempts >= spec.max_connection_attempts or left_s <= pause_s:
                    raise
                job = self._jobs.get(worker.id)
                if job is not None:
                    self._set(job, "processing", f"not ready: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * PAUSE_GROWTH, max(MAX_PAUSE_S, config.startup_interval_s))

    async def _update(self, worker: Worker, spec: WorkerSpec) -> None:
        members = [w for w in self._parts.registry.workers if w.spec.url == worker.spec.url]
        for member in members:
            member.spec, member.cost = spec, spec.cost
            member.changed()

    async def _remove(self, worker: Worker) -> None:
        deadline = self._parts.clock() + self._parts.drain_s
        while worker.num_running and self._parts.clock() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self._parts.registry.remove(worker)
        logger.info("worker removed url=%s", worker.url)


class WorkerPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `PUT /workers/{id}` may change; what is left out stays."""

    api_key: str | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    cost: float | msgspec.UnsetType = msgspec.UNSET
    labels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    health_check_timeout_secs: float | msgspec.UnsetType = msgspec.UNSET
    health_check_interval_secs: float | msgspec.UnsetType = msgspec.UNSET
    health_success_threshold: int | msgspec.UnsetType = msgspec.UNSET
    health_failure_threshold: int | msgspec.UnsetType = msgspec.UNSET
    disable_health_check: bool | msgspec.UnsetType = msgspec.UNSET

    def applied(self, spec: WorkerSpec) -> WorkerSpec:
        """The spec with these changes.

        Raises:
            msgspec.ValidationError: A value is out of bounds.
        """
        given = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not msgspec.UNSET
        }
        return msgspec.convert({**msgspec.structs.asdict(spec), **given}, WorkerSpec)
