"""The backend interface: computes steps at once in this process, or queues them on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.sampling.constraints import Masks, RowOutcome
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch


class PendingSample(Protocol):
    """Tokens that were sampled, or that a device will sample."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> SampleOutput:
        """Block until the tokens are on the host.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class StepBackend(Protocol):
    """Computes one step after another; called in the order of the methods.

    Attributes:
        batch: Inputs of the forward pass.
        immediate: Whether methods return only when their work is done. If not, work is queued, and
          tokens that constraints change afterwards reach `correct` with the next step.
        runs_once: Whether a forward pass must not be repeated, because it changes recurrent
          states; `correct` is then called before it.
    """

    batch: ForwardBatch
    immediate: bool
    runs_once: bool

    def update(self, plan: StepPlan) -> None:
        """Write page tables, copy pages, mirror the parameters of requests that joined or left."""
        ...

    def prepare(
        self, work: Callable[[Sequence[torch.Tensor]], None], arrays: Sequence[IntArray]
    ) -> None:
        """Call `work` with the arrays on the model's device, before the model runs.

        On a device the call is queued with the step, so `work` must not wait for results.
        """
        ...

    def forward(self, plan: StepPlan, *, graph: bool) -> None:
        """Run the model; with `graph` a captured graph may be replayed."""
        ...

    def step(self, plan: StepPlan, masks: Masks | None) -> PendingSample:
        """`forward` and `draw` in one call; immediate backends only."""
        ...

    def correct(self, plan: StepPlan) -> None:
        """Apply the corrections from `accept`; rerun the forward pass if it read wrong ids."""
        ...

    def draw(self, plan: StepPlan, masks: Masks | None) -> PendingSample:
        """Sample the rows of the step."""
        ...

    def draw_rows(self, rows: IntArray, batch: SamplingBatch, masks: Masks | None) -> SampleOutput:
        """Sample some rows after `forward`; immediate backends only.

        Args:
            rows: Indices into the sampled rows.
            batch: Sampling parameters of these rows.
            masks: Token masks of these rows.
        """
        ...

    def keep(self, paths: Mapping[int, Sequence[int]], newest: Mapping[int, int]) -> None:
        """Move the KV of accepted draft tokens to their final positions; immediate backends only.

        Args:
            paths: Slice index -> its accepted draft tokens, in order of depth.
            newest: Request slot -> its newest token, which the next step may read as input.
        """
        ...

    def accept(
        self, plan: StepPlan, drawn: SampleOutput, outcomes: Mapping[int, RowOutcome]
    ) -> None:
        """Record sampled tokens, as constraints changed them, by row; store the newest tokens."""
        ...

    def finish(self, sample: PendingSample) -> None:
        """Mark the end of a step: all work queued so far belongs to `sample`."""
        ...

    def discard(self) -> None:
        """Release the resources of a failed step."""
        ...

    # ---- for worker halves of capabilities

    def logits(self, rows: IntArray) -> torch.Tensor: ...

    def hidden(self, rows: IntArray) -> torch.Tensor: ...

    def layer_hidden(self, layer: int, rows: IntArray) -> torch.Tensor: ...

    def token_logprobs(
        self, rows: IntArray, token_ids: IntArray, options: LogprobOptions
    ) -> Callable[[], TokenLogprobs]: ...
