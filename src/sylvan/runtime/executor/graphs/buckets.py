"""Runs a model on tensors: small steps by graphs captured for their sizes, large ones op by op.

A graph is replayed for steps of up to its number of rows and requests; what is missing is padded.
Those of decoding have a row for each request, the others hold any mix of prompts and decoding.

Shapes: T rows, R requests, V vocabulary, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from sylvan.kernels import ops
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.graphs.sizes import Bucket
from sylvan.runtime.models.registry import Model
from sylvan.runtime.platform.api import Graph, Platform
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """One forward pass inside `Stream.run`. Results live until the next one."""

    def bucket(self, tokens: int, requests: int) -> Bucket | None:
        """What a step of so many is padded to; None: it is run as it is."""
        ...

    def run(self, batch: ForwardBatch, *, graph: bool) -> torch.Tensor:
        """Logits float32 (samples, V); with `graph` the batch is padded to a bucket."""
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

    def bucket(self, tokens: int, requests: int) -> Bucket | None:
        """See `Runner.bucket`."""
        return None

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        """See `Runner.run`."""
        self._prepare(batch)
        batch.attention.plan(batch)
        self._hidden_TD = self._model.forward(self._model.embed(batch), batch)
        return self._model.head(ops.take_rows(self._hidden_TD, batch.sample_rows))

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.at`."""
        return self._model.head(ops.take_rows(self._hidden_TD, rows))


class BucketRunner:
    """Replays a graph where one was captured for the batch's padded size."""

    def __init__(self, eager: TensorRunner, buckets: Iterable[Bucket]) -> None:
        self._eager = eager
        self._buckets = sorted(buckets)
        self._graphs: dict[Bucket, Graph] = {}
        self._logits_RV = torch.empty(0)  # of whichever graph was replayed last

    def capture(
        self,
        platform: Platform,
        point: Callable[[Bucket], ForwardBatch],
        clock: Clock = monotonic,
    ) -> None:
        """Capture all buckets, the largest first: the smaller ones fit into its memory.

        Args:
            platform: Makes the graphs.
            point: Makes the batch read the first so many rows of its persistent inputs.
            clock: For the report.
        """
        begun = clock()
        most = max(bucket.requests for bucket in self._buckets)
        for count, bucket in enumerate(reversed(self._buckets), 1):
            batch = point(bucket)
            platform.peak(lambda batch=batch: self._warm_up(batch, most))  # compiles kernels
            graph = platform.graph()
            assert graph is not None, "captured only where there are graphs"
            with torch.inference_mode():
                graph.capture(lambda batch=batch: self._keep(batch))
            self._graphs[bucket] = graph
            logger.debug("captured a graph for %s (%d of %d)", bucket, count, len(self._buckets))
        logger.info("captured %d graphs in %.1f s", len(self._buckets), clock() - begun)

    def bucket(self, tokens: int, requests: int) -> Bucket | None:
        """See `Runner.bucket`."""
        same = tokens == requests
        fits = (
            b
            for b in self._buckets
            if b.rows >= tokens and b.requests >= requests and b.decodes == same
        )
        return next(fits, None)

    def run(self, batch: ForwardBatch, *, graph: bool) -> torch.Tensor:
        """See `Runner.run`."""
        if not graph:
            return self._eager.run(batch)
        self._graphs[Bucket(batch.num_tokens, batch.num_reqs)].replay()
        return self._logits_RV[: batch.num_reqs]

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.at`."""
        return self._eager.at(rows)

    def _warm_up(self, batch: ForwardBatch, most: int) -> None:
        with torch.inference_mode():
            logits = self._eager.run(batch)
            if not len(self._logits_RV):
                self._logits_RV = logits.new_empty(most, logits.shape[1])

    def _keep(self, batch: ForwardBatch) -> torch.Tensor:
        """Results of all graphs lie in one place, so that their own memory may be one another's."""
        logits = self._eager.run(batch)
        return self._logits_RV[: len(logits)].copy_(logits)
