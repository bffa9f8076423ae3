"""Background jobs that add, change and remove workers, with a state that operators can query."""

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
        kind: What the job does.
        worker_id: ID of the worker.
        url: Address of the worker.
        state: Progress.
        message: What it waits for, or what went wrong.
        created_s: Seconds since the Unix epoch.
        updated_s: Seconds since the Unix epoch.
    """

    kind: JobKind
    worker_id: str
    url: str
    state: JobState
    message: str
    created_s: float
    updated_s: float

    def view(self) -> dict[str, Any]:
        """Return the view in `/workers`."""
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
    """Dependencies of jobs.

    Attributes:
        registry: All workers.
        discover: Asks a new worker about itself.
        config: Timeouts of new workers.
        breaker: Circuit breaker settings of new workers.
        drain_s: Seconds for which a removed worker may finish its requests.
        clock: Monotonic clock, for durations.
        wall: Wall clock, in seconds since the Unix epoch.
    """

    registry: Registry
    discover: Discover
    config: WorkersConfig
    breaker: BreakerConfig
    drain_s: float
    clock: Clock
    wall: Clock


class Jobs:
    """Runs a bounded number of jobs at a time; belongs to one event loop."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._jobs: OrderedDict[str, WorkerJob] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    def get(self, worker_id: str) -> WorkerJob | None:
        """Return the last job of a worker."""
        return self._jobs.get(worker_id)

    @property
    def open(self) -> list[WorkerJob]:
        """Number of unfinished jobs."""
        return [job for job in self._jobs.values() if job.state in ("pending", "processing")]

    def add(self, spec: WorkerSpec) -> str:
        """Add a worker once it answers; return its ID.

        Raises:
            RequestError: The worker exists, or is being added (409).
            QueueFullError: There are too many jobs.
        """
        if self._parts.registry.by_url(spec.url) or self._parts.registry.by_url(f"{spec.url}@0"):
            raise RequestError(f"A worker at {spec.url} already exists.", param="url", status=409)
        if any(job.url == spec.url for job in self.open):
            raise RequestError(f"{spec.url} is being added.", param="url", status=409)
        if len(self._parts.registry) + len(self.open) >= MAX_WORKERS:
            raise QueueFullError(f"There are {MAX_WORKERS} workers; no more can be added.")
        worker = Worker(spec, self._parts.clock, self._parts.breaker)
        self._start("add", worker, self._add(worker))
        return worker.id

    def update(self, worker: Worker, spec: WorkerSpec) -> None:
        """Change the settings of a worker."""
        self._start("update", worker, self._update(worker, spec))

    def remove(self, worker: Worker) -> None:
        """Remove a worker once it has finished its requests."""
        worker.drain()
        self._start("remove", worker, self._remove(worker))

    def cancel(self, worker_id: str) -> bool:
        """Cancel adding a worker; return whether it was being added."""
        task, job = self._tasks.get(worker_id), self._jobs.get(worker_id)
        if task is None or job is None or job.kind != "add":
            return False
        task.cancel()
        self._set(job, "failed", "cancelled")
        return True

    def cancel_url(self, url: str) -> None:
        """Cancel adding the worker at an address."""
        for job in self.open:
            if job.url == url:
                self.cancel(job.worker_id)

    async def wait_all(self) -> None:
        """Wait until no job is open."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Cancel all jobs."""
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
        """Wait until the worker answers; return its description.

        Raises:
            UpstreamError: It did not answer in time, or within its number of attempts.
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
    """The changes that `PUT /workers/{id}` accepts; fields left out stay."""

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
        """Return the spec with these changes.

        Raises:
            msgspec.ValidationError: A value is out of range.
        """
        given = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value is not msgspec.UNSET
        }
        return msgspec.convert({**msgspec.structs.asdict(spec), **given}, WorkerSpec)
