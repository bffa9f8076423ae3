"""The store and worker of batches, for routes."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.server.stores.batch_worker import BatchWorker
from sylvan.runtime.server.stores.batches import BatchStore


@dataclass(frozen=True, slots=True)
class Batches:
    """The store of batches, and the worker that runs them."""

    store: BatchStore
    worker: BatchWorker
