"""Chooses the worker of a rank by its pipeline stage and its group of requests."""

from __future__ import annotations

from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.control import StepGate
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.executor.local import PlanWorker
from sylvan.runtime.executor.local_requests import LocalPagesWorker, local_requests
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.executor.stages import StageWorker
from sylvan.runtime.executor.worker import StepWorker
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.pool.prefault import PagePrefaulter


def plan_worker(
    mesh: Mesh,
    backend: ImmediateBackend,
    slots: RequestSlots,
    workers: tuple[CapabilityWorker, ...],
    gate: StepGate,
    prefaulter: PagePrefaulter,
) -> PlanWorker:
    """Build the worker of this rank.

    Args:
        mesh: The ranks that share the model.
        backend: Computes the layers of this rank.
        slots: Sampling parameters of requests.
        workers: Worker halves of capabilities.
        gate: Closed while no step may run.
        prefaulter: Notified when steps run.
    """
    made: PlanWorker
    if mesh.stage.is_last:
        made = StepWorker(backend, slots, workers, gate, prefaulter)
    else:
        made = StageWorker(backend, workers, gate, prefaulter)
    if (local := local_requests(backend.batch, mesh)) is None:
        return made
    backend.local = local
    return LocalPagesWorker(made, local)
