"""Store and worker of batches, as routes are given them."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.server.stores.batches import BatchStore
from sylvan.runtime.server.stores.worker import BatchWorker


@dataclass(frozen=True, slots=True)
class Batches:
    """Where batches lie, and what works them off."""

    store: BatchStore
    worker: BatchWorker
