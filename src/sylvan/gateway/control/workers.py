"""`/workers`: routes that list, add, change and remove workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sylvan.gateway.control.api import OwnRoute, Params
from sylvan.gateway.control.bodies import decoded, malformed
from sylvan.gateway.control.views import counts, pending_view, worker_view
from sylvan.gateway.http.caller import Caller
from sylvan.gateway.workers.jobs import Jobs, WorkerPatch
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.spec import WorkerSpec, checked
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import RequestError

Changed = Callable[[str, WorkerSpec | None], None]

MAX_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerRoutes:
    """Lists, adds, changes and removes workers.

    Attributes:
        registry: All workers.
        jobs: Adds and removes workers in the background.
        changed: Called with the address of each worker that an operator changes, and its new
            state; None if the worker was removed.
    """

    registry: Registry
    jobs: Jobs
    changed: Changed

    @property
    def routes(self) -> tuple[OwnRoute, ...]:
        """Return the routes."""
        one = "/workers/{id}"
        return (
            OwnRoute(path="/workers", handler=self.show_all, level="operator"),
            OwnRoute(path="/workers", handler=self.add, methods=("POST",), level="operator"),
            OwnRoute(path=one, handler=self.show, level="operator"),
            OwnRoute(path=one, handler=self.update, methods=("PUT",), level="operator"),
            OwnRoute(path=one, handler=self.remove, methods=("DELETE",), level="operator"),
        )

    async def show_all(self, caller: Caller, params: Params) -> None:
        """List all workers."""
        workers = self.registry.workers
        views = [worker_view(worker, self.jobs.get(worker.id)) for worker in workers]
        known = {worker.id for worker in workers}
        waiting = [
            pending_view(job, job.worker_id) for job in self.jobs.open if job.worker_id not in known
        ]
        content = {"workers": [*views, *waiting], "total": len(views), "stats": counts(workers)}
        await caller.reply_json(content)

    async def add(self, caller: Caller, params: Params) -> None:
        """Start adding a worker."""
        spec = checked(decoded(await caller.body(MAX_BODY_BYTES), WorkerSpec))
        worker_id = self.jobs.add(spec)
        self.changed(spec.url, spec)
        content = {
            "status": "accepted",
            "worker_id": worker_id,
            "url": spec.url,
            "location": f"/workers/{worker_id}",
            "message": "The worker is being added.",
        }
        await caller.reply_json(content, 202, ("location", f"/workers/{worker_id}"))

    async def show(self, caller: Caller, params: Params) -> None:
        """Describe one worker."""
        job = self.jobs.get(params["id"])
        worker = self._find(params["id"])
        if worker is not None:
            await caller.reply_json(worker_view(worker, job))
        elif job is not None and (job.kind, job.state) != ("remove", "succeeded"):
            await caller.reply_json(pending_view(job, params["id"]))
        else:
            raise _unknown(params["id"])

    async def update(self, caller: Caller, params: Params) -> None:
        """Start changing the settings of a worker."""
        worker = self._find(params["id"])
        if worker is None:
            raise _unknown(params["id"])
        patch = decoded(await caller.body(MAX_BODY_BYTES), WorkerPatch)
        try:
            spec = patch.applied(worker.spec)
        except msgspec.ValidationError as error:
            raise malformed(error) from error
        self.jobs.update(worker, spec)
        self.changed(spec.url, spec)
        content = {"status": "accepted", "worker_id": worker.id, "message": "It is being changed."}
        await caller.reply_json(content, 202)

    async def remove(self, caller: Caller, params: Params) -> None:
        """Start removing a worker; it first finishes its requests."""
        worker = self._find(params["id"])
        job = self.jobs.get(params["id"])
        if worker is not None:
            self.jobs.remove(worker)
            self.changed(worker.spec.url, None)
        elif job is not None and self.jobs.cancel(params["id"]):
            self.changed(job.url, None)
        else:
            raise _unknown(params["id"])
        content = {"status": "accepted", "worker_id": params["id"], "message": "It is removed."}
        await caller.reply_json(content, 202)

    def _find(self, name: str) -> Worker | None:
        return self.registry.get(name) or self.registry.by_url(name)


def _unknown(worker_id: str) -> RequestError:
    return RequestError(f"There is no worker {worker_id[:200]!r}.", param="id", status=404)
