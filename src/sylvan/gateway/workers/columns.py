"""The load of many workers as arrays, for policies that scan all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sylvan.gateway.workers.worker import Worker


class LoadColumns:
    """Tracks the counts of some workers until it is closed.

    Args:
        workers: The workers; must not change while this is open.

    Attributes:
        workers: The workers.
        rows: Row of each worker, by its ID.
        loads: `Worker.load` by row.
        tokens: `Worker.waiting_tokens` by row.
        costs: `Worker.cost` by row.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.rows = {worker.id: row for row, worker in enumerate(workers)}
        self.loads: NDArray[np.int64] = np.array([worker.load for worker in workers], np.int64)
        self.tokens = np.array([worker.waiting_tokens for worker in workers], np.int64)
        self.costs: NDArray[np.float64] = np.array([worker.cost for worker in workers])
        for worker in workers:
            worker.on_counts.append(self._see)

    def close(self) -> None:
        """Stop tracking."""
        for worker in self.workers:
            worker.on_counts.remove(self._see)

    def _see(self, worker: Worker) -> None:
        row = self.rows[worker.id]
        self.loads[row] = worker.num_running + worker.peer_running + worker.foreign_load
        self.tokens[row] = worker.queued_tokens + worker.peer_tokens
