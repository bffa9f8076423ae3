"""Runs a model on tensors: small steps replay captured graphs, large ones run op by op.

A graph serves steps of up to its number of rows and requests, with padding. Decode graphs have one
row per request; the others hold any mix of prompts and decoding.

Shapes: T rows, R requests, V vocabulary, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.graph_buckets import GraphBucket
from sylvan.runtime.executor.runner import EagerRunner
from sylvan.runtime.platform.api import Platform, PlatformGraph
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.params import SamplingSlots
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


class BucketRunner:
    """Replays a graph where one was captured for the batch's padded size."""

    verifies_drafts = False

    def __init__(self, eager: EagerRunner, buckets: Iterable[GraphBucket]) -> None:
        self._eager = eager
        self._buckets = sorted(buckets)
        self._graphs: dict[GraphBucket, PlatformGraph] = {}
        self._logits_RV = torch.empty(0)  # of the graph replayed last
        self._capture: Callable[[], None] = lambda: None  # recaptures all buckets

    def capture(
        self,
        platform: Platform,
        point: Callable[[GraphBucket], ForwardBatch],
        clock: Clock = monotonic,
    ) -> None:
        """Capture all buckets, largest first, so that smaller ones reuse its memory.

        Args:
            platform: Makes the graphs.
            point: Makes the batch view the first N rows of its persistent inputs.
            clock: Clock for the log.
        """
        self._capture = lambda: self.capture(platform, point, clock)
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

    def release(self) -> None:
        """Free all graphs; no step may replay one before `capture_again`."""
        self._graphs.clear()
        self._logits_RV = torch.empty(0)

    def capture_again(self) -> None:
        """Recapture all buckets after memory addresses changed."""
        self.release()
        self._capture()

    def bucket(self, tokens: int, requests: int) -> GraphBucket | None:
        same = tokens == requests
        fits = (
            b
            for b in self._buckets
            if b.rows >= tokens and b.requests >= requests and b.decodes == same
        )
        return next(fits, None)

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        if not graph:
            return self._eager.run(batch)
        self._graphs[GraphBucket(batch.num_tokens, batch.num_reqs)].replay()
        return self._logits_RV[: batch.num_reqs]

    def logits(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._eager.logits(rows)

    def hidden(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._eager.hidden(rows)

    def layer_hidden(self, layer: int, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._eager.layer_hidden(layer, rows)

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        return self._eager.head(vectors_RD)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._eager.constant(tensor)

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> None:
        pass

    def _warm_up(self, batch: ForwardBatch, most: int) -> None:
        with torch.inference_mode():
            logits = self._eager.run(batch)
            if not len(self._logits_RV):
                self._logits_RV = logits.new_empty(most, logits.shape[1])

    def _keep(self, batch: ForwardBatch) -> torch.Tensor:
        """Store the results of all graphs in one buffer, so that graphs can share their memory."""
        logits = self._eager.run(batch)
        return self._logits_RV[: len(logits)].copy_(logits)
