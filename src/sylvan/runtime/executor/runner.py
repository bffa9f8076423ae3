"""Runs a model on one step's batch: eagerly here, or by a recorded program in `graphs`."""

from __future__ import annotations

from typing import Protocol

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch


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
