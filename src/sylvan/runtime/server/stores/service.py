"""The store and worker of batches, for routes."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.runtime.server.stores.batches import BatchStore
from sylvan.runtime.server.stores.worker import BatchWorker


@dataclass(frozen=True, slots=True)
class Batches:
    """The store of batches, and the worker that runs them."""

    store: BatchStore
    worker: BatchWorker
