"""Runs a model on tensors: prompts op by op, decoding steps by graphs captured for batch sizes.

Shapes: T rows, R requests, V vocabulary, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sylvan.kernels import ops
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.models.registry import Model
from sylvan.runtime.platform.api import Graph, Platform
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

MAX_BUCKET = 256


class Runner(Protocol):
    """One forward pass inside `Stream.run`. Results live until the next one."""

    def padded(self, requests: int) -> int:
        """Rows that a decoding step of so many requests is padded to; 0: it is run as it is."""
        ...

    def run(self, batch: ForwardBatch, *, graph: bool) -> torch.Tensor:
        """Logits float32 (num_samples, V); with `graph` the batch is padded and only decodes."""
        ...

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of other rows (int64) of the step just run op by op."""
        ...


class TensorRunner:
    """Op by op, always. `prepare` changes the batch before each pass, on the device."""

    def __init__(self, model: Model, prepare: Callable[[ForwardBatch], None]) -> None:
        self._model = model
        self._prepare = prepare
        self._hidden_TD = torch.empty(0)

    def padded(self, requests: int) -> int:
        """See `Runner.padded`."""
        return 0

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        """See `Runner.run`."""
        self._prepare(batch)
        batch.attention.plan(batch)
        self._hidden_TD = self._model.forward(self._model.embed(batch), batch)
        return self._model.head(ops.take_rows(self._hidden_TD, batch.sample_rows))

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.at`."""
        return self._model.head(ops.take_rows(self._hidden_TD, rows))


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    logits: torch.Tensor  # (R, V)


class BucketRunner:
    """Replays a graph where one was captured for the batch's padded size."""

    def __init__(self, eager: TensorRunner, buckets: Sequence[int]) -> None:
        self._eager = eager
        self._sizes = sorted(buckets)
        self._captured: dict[int, _Captured] = {}

    def capture(
        self,
        platform: Platform,
        point: Callable[[int], ForwardBatch],
        clock: Clock = monotonic,
    ) -> None:
        """Capture all buckets, the largest first: the smaller ones fit into its memory.

        Args:
            platform: Makes the graphs.
            point: Makes the batch read the first so many rows of its persistent inputs.
            clock: For the report.
        """
        begun = clock()
        for count, size in enumerate(reversed(self._sizes), 1):
            batch = point(size)
            platform.peak(lambda batch=batch: self._warm_up(batch))  # kernels are compiled here
            graph = platform.graph()
            assert graph is not None, "captured only where there are graphs"
            with torch.inference_mode():
                logits = graph.capture(lambda batch=batch: self._eager.run(batch))
            self._captured[size] = _Captured(graph, logits)
            logger.debug(
                "captured a graph for %d requests (%d of %d)", size, count, len(self._sizes)
            )
        logger.info("captured %d graphs in %.1f s", len(self._sizes), clock() - begun)

    def padded(self, requests: int) -> int:
        """See `Runner.padded`."""
        return next((size for size in self._sizes if size >= requests), 0)

    def run(self, batch: ForwardBatch, *, graph: bool) -> torch.Tensor:
        """See `Runner.run`."""
        if not graph:
            return self._eager.run(batch)
        captured = self._captured[batch.num_reqs]
        captured.graph.replay()
        return captured.logits

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.at`."""
        return self._eager.at(rows)

    def _warm_up(self, batch: ForwardBatch) -> None:
        with torch.inference_mode():
            self._eager.run(batch)


def bucket_sizes(max_reqs: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: steps of about a quarter, and the largest batch itself."""
    most = min(max_reqs, MAX_BUCKET)
    sizes = [1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16)]
    sizes += range(160, MAX_BUCKET + 1, 32)
    return tuple(sorted({size for size in sizes if size < most} | {most}))
