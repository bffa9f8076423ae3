"""JSON views of workers for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.gateway.workers.jobs import WorkerJob
from sylvan.gateway.workers.worker import Worker


def worker_view(worker: Worker, job: WorkerJob | None = None) -> dict[str, Any]:
    """One worker, without its keys."""
    spec, found = worker.spec, worker.found
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": worker.models[0] if worker.models else "unknown",
        "models": list(worker.models),
        "priority": spec.priority,
        "cost": spec.cost,
        "worker_type": spec.worker_type,
        "is_healthy": worker.is_healthy,
        "is_draining": worker.draining,
        "load": worker.load,
        "queued_tokens": worker.waiting_tokens,
        "circuit_breaker": worker.breaker.state.value,
        "connection_mode": worker.connection,
        "runtime_type": spec.runtime,
        "bootstrap_port": spec.bootstrap_port,
        "continues_streams": found.journals,
        "cache_tokens": found.capacity_tokens or None,
        "dp_rank": worker.dp_rank,
        "metadata": {**spec.labels, **({"version": found.version} if found.version else {})},
        "job_status": job.view() if job is not None and job.state != "succeeded" else None,
    }


def pending_view(job: WorkerJob, worker_id: str) -> dict[str, Any]:
    """A worker that is being added, or that could not be added."""
    return {"id": worker_id, "url": job.url, "is_healthy": False, "job_status": job.view()}


def counts(workers: Sequence[Worker]) -> dict[str, int]:
    """The number of workers of each kind."""
    return {
        f"{kind}_count": sum(worker.kind == kind for worker in workers)
        for kind in ("prefill", "decode", "regular")
    }
