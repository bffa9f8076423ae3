"""Interface of model runners, and the reference runner; faster ones are in `graphs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from sylvan.kernels import ops
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import EMBEDDINGS
from sylvan.runtime.executor.graph_buckets import GraphBucket
from sylvan.runtime.executor.outputs import keep_outputs, keep_stream
from sylvan.runtime.executor.steps import FusedStep
from sylvan.runtime.models.registry import Model
from sylvan.runtime.sampling.api import TokenSampler
from sylvan.runtime.sampling.params import SamplingSlots


class ModelRunner(Protocol):
    """One forward pass. Results are views that live until the next `run`.

    Rows are given as int32 numpy arrays or as int64 tensors on the model's device.

    Attributes:
        verifies_drafts: Whether a slice may have several sampled rows.
    """

    verifies_drafts: bool

    def bucket(self, tokens: int, requests: int) -> GraphBucket | None:
        """Padded size for a step of this size; None for no padding."""
        ...

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        """Compute all rows, store their KV, return logits of `batch.sample_rows`.

        With `graph` the batch is padded to a bucket.
        Returns: float32 (num_samples, vocab_size); the caller may overwrite it.
        """
        ...

    def logits(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        """Logits of other rows of the last step, which ran without a graph: float32 (n, V).

        At most `batch.limits.max_sampled_rows` at once.
        """
        ...

    def hidden(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        """Hidden vectors after the final norm, for rows of the last step: float32 (n, D)."""
        ...

    def layer_hidden(self, layer: int, rows: IntArray | torch.Tensor) -> torch.Tensor:
        """Output of one layer for rows of the last step: (n, D).

        Raises:
            KeyError: the runner does not keep this layer's output.
        """
        ...

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        """Apply the model's head to vectors outside of steps: float32 (R, C).

        At most `batch.limits.max_sampled_rows` at once; the result is the caller's.
        """
        ...

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that steps read for a float32 constant of the model: itself or a copy."""
        ...

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> FusedStep | None:
        """A `FusedStep` for this runner and sampler; None if they cannot be fused.

        Args:
            batch: Buffers of all steps.
            sampler: The sampler to fuse.
            last_token: The newest token of each request slot.
            params: Sampling parameters of the request slots.
        """
        ...


@runtime_checkable
class StageRunner(Protocol):
    """Additional interface of runners of pipeline stages."""

    def put_stream(self, stream_TD: torch.Tensor) -> None:
        """Set the residual stream that the next step starts from: float32 (T, D), all rows.

        For stages after the first.
        """
        ...

    def stream(self, num_rows: int) -> torch.Tensor:
        """The residual stream after the step just run, in a stage before the last: (T, D)."""
        ...


OnHead = Callable[[IntArray | torch.Tensor | None], None]
"""See `EagerRunner`."""


class EagerRunner:
    """Runs the model's Python on tensors, op by op: the reference for every other runner.

    Args:
        model: The model with its weights.
        prepare: Changes the batch before each pass, on the device.
        hidden_layers: Layers whose output is kept.
        on_head: Called before the head with the rows it runs on; None for vectors outside steps.
        stream_after: Last layer of a pipeline stage before the last one.
    """

    verifies_drafts = True

    def __init__(
        self,
        model: Model,
        prepare: Callable[[ForwardBatch], None] | None = None,
        hidden_layers: Sequence[int] = (),
        on_head: OnHead = lambda rows: None,
        stream_after: int | None = None,
    ) -> None:
        self._model, self._prepare, self._on_head = model, prepare, on_head
        self._hidden_TD = torch.empty(0)
        self._given_TD: torch.Tensor | None = None  # rows from the previous stage
        self._layers: dict[int, torch.Tensor] = {}
        self._streams: dict[int, torch.Tensor] = {}
        keep_outputs(model, hidden_layers, self._layers)
        if stream_after is not None:
            keep_stream(model, stream_after, self._streams)

    def bucket(self, tokens: int, requests: int) -> GraphBucket | None:
        return None

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        if self._prepare is not None:
            self._prepare(batch)
        batch.plan_attention()
        x_TD = self._model.embed(batch) if self._given_TD is None else self._given_TD
        if x_TD.is_floating_point():  # transformers models return ids, and embed them in `forward`
            for rows, vectors_ND in batch.vectors(EMBEDDINGS, x_TD):
                x_TD[rows] = vectors_ND
        self._hidden_TD = self._model.forward(x_TD, batch)
        self._on_head(batch.sample_rows)
        return self._model.head(ops.take_rows(self._hidden_TD, batch.sample_rows))

    def put_stream(self, stream_TD: torch.Tensor) -> None:
        self._given_TD = stream_TD

    def stream(self, num_rows: int) -> torch.Tensor:
        [stream_TD] = self._streams.values()
        return stream_TD[:num_rows]

    def logits(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        self._on_head(rows)
        return self._model.head(self._take(self._hidden_TD, rows))

    def hidden(self, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._take(self._hidden_TD, rows).float()

    def layer_hidden(self, layer: int, rows: IntArray | torch.Tensor) -> torch.Tensor:
        return self._take(self._layers[layer], rows)

    def head(self, vectors_RD: torch.Tensor) -> torch.Tensor:
        self._on_head(None)
        return self._model.head(vectors_RD.to(self._hidden_TD)).float()

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fuse(
        self,
        batch: ForwardBatch,
        sampler: TokenSampler,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> None:
        pass

    def _take(self, values: torch.Tensor, rows: IntArray | torch.Tensor) -> torch.Tensor:
        index = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
        return ops.take_rows(values, index.to(values.device))
