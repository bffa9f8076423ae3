"""The load of many workers as columns, so that a policy can look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sylvan.gateway.workers.worker import Worker


class LoadColumns:
    """Follows the counts of some workers, until it is closed.

    Args:
        workers: Never changed while this is open.

    Attributes:
        workers: The same.
        rows: The place of each worker, by its id.
        loads: `Worker.load` of each.
        tokens: `Worker.waiting_tokens` of each.
        costs: `Worker.cost` of each.
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
        """Follow them no more."""
        for worker in self.workers:
            worker.on_counts.remove(self._see)

    def _see(self, worker: Worker) -> None:
        row = self.rows[worker.id]
        self.loads[row] = worker.num_running + worker.peer_running + worker.foreign_load
        self.tokens[row] = worker.queued_tokens + worker.peer_tokens
