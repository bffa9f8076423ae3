"""Runs a model on one step's batch: eagerly here, or by a recorded program in `graphs`."""

from __future__ import annotations

from typing import Protocol

import torch

from sylvan.kernels import ops
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.steps import Step
from sylvan.runtime.models.registry import Model
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.params import SamplingSlots


class GraphRunner(Protocol):
    """One forward pass. Results are views that live until the next `run`."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute all rows, store their KV, return logits of `batch.sample_rows`.

        Returns: float32 (num_samples, vocab_size); the caller may overwrite it.
        """
        ...

    def logits(self, rows: IntArray) -> torch.Tensor:
        """Logits of other rows of the step just run, at most `batch.limits.max_reqs` at once."""
        ...

    def hidden(self, rows: IntArray) -> torch.Tensor:
        """Hidden vectors after the final norm, of rows of the step just run: float32 (n, D)."""
        ...

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        """The model's head on vectors that are no rows of a step: float32 (R, C).

        At most `batch.limits.max_reqs` at once; the result is the caller's.
        """
        ...

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> Step | None:
        """Steps that leave less to Python, where this runner and this sampler can; or None.

        Args:
            batch: The buffers of all steps.
            sampler: What would draw.
            last_token: The newest token of each request slot.
            params: Sampling parameters of the request slots.
        """
        ...


class EagerRunner:
    """Runs the model's Python on tensors, op by op: the reference for every other runner."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._hidden_TD = torch.empty(0)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """See `GraphRunner.run`."""
        batch.attention.plan(batch)
        self._hidden_TD = self._model.forward(self._model.embed(batch), batch)
        return self._model.head(ops.take_rows(self._hidden_TD, batch.sample_rows))

    def logits(self, rows: IntArray) -> torch.Tensor:
        """See `GraphRunner.logits`."""
        return self._model.head(self._take(rows))

    def hidden(self, rows: IntArray) -> torch.Tensor:
        """See `GraphRunner.hidden`."""
        return self._take(rows).float()

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        """See `GraphRunner.head`."""
        return self._model.head(vectors_RD.to(self._hidden_TD)).float()

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> None:
        """See `GraphRunner.fuse`."""

    def _take(self, rows: IntArray) -> torch.Tensor:
        index = torch.from_numpy(rows).to(self._hidden_TD.device)
        return ops.take_rows(self._hidden_TD, index)
