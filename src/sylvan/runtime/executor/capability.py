"""Worker half of a capability: runs next to the model, driven by data in the step plan.

The control half is `sched.capability.Capability`; the two meet in `StepPlan.work` and
`StepResult.reports`, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from sylvan.protocol.arrays import FloatArray, IntArray
from sylvan.protocol.commands import ExecutorCommand
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import Join, StepPlan, StepResult
from sylvan.runtime.executor.backend import StepBackend
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.executor.rounds import Verified
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.sampling.constraints import Constraints

Report = Callable[[], Any]
"""Builds the report of a step; called once the step's results have arrived."""
Handler = Callable[[Any], dict[str, Any]]
"""Runs a command and returns the body of its result; raises ConfigError to reject it."""


class Filler(Protocol):
    """Computes a whole step on an immediate backend."""

    def fill(self, plan: StepPlan, backend: Any, slots: RequestSlots) -> Verified:
        """Run as many forward passes as it takes; return the outputs of all slices."""
        ...


@dataclass(slots=True, eq=False)
class StepContext:
    """One step as worker halves see it.

    Attributes:
        plan: What the step computes.
        may_use_graph: Whether a captured graph may be replayed.
        errors: Slice index -> the error of its request.
        items: Row -> the embedding of its media item, float32 (D,), in models that embed items
            apart from text.
    """

    plan: StepPlan
    backend: StepBackend
    may_use_graph: bool = True
    errors: dict[int, str] = field(default_factory=dict[int, str])
    items: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])

    @property
    def batch(self) -> ForwardBatch:
        """Inputs of the forward pass."""
        return self.backend.batch

    def prepare(self, work: Callable[[Sequence[torch.Tensor]], None], *arrays: IntArray) -> None:
        """Call `work` with the arrays on the model's device, before the model runs.

        On a device the call is queued with the step, so `work` must not wait for results.
        """
        self.backend.prepare(work, arrays)

    def logits(self, rows: IntArray) -> torch.Tensor:
        """Return logits of any rows of the step, float32 (n, V); after the forward pass."""
        return self.backend.logits(rows)

    def hidden(self, rows: IntArray) -> torch.Tensor:
        """Return hidden vectors after the final norm, float32 (n, D); after the forward pass."""
        return self.backend.hidden(rows)

    def layer_hidden(self, layer: int, rows: IntArray) -> torch.Tensor:
        """Return the output of a layer in `hidden_layers`, (n, D); after the forward pass."""
        return self.backend.layer_hidden(layer, rows)

    def token_logprobs(
        self, rows: IntArray, token_ids: IntArray, options: LogprobOptions
    ) -> Callable[[], TokenLogprobs]:
        """Log probabilities of `token_ids` as predicted by rows of the step.

        Returns: a function that reads them once the step is done, for use in a `Report`.
        """
        return self.backend.token_logprobs(rows, token_ids, options)

    @contextmanager
    def guard(self, index: int, what: str) -> Iterator[None]:
        """Context in which a failure fails only the request of slice `index`."""
        try:
            yield
        except FAILURES as error:
            self.errors[index] = f"{what}: {error}"


class CapabilityWorker:
    """Base class: override the hooks you need. `work` comes from the control half, never None.

    The hooks around a step are called only for steps with work for this capability. They may run
    before the step's results are on the host.

    Attributes:
        name: Name of the capability.
        reads_rows: Whether `after_forward` reads logits or hidden vectors of rows that are not
            sampled; such a step is not replayed from a captured graph.
        in_layers: Whether it changes layers, so that every pipeline stage needs it. Stages
          before the last call `prepare`, `join` and `before_forward` only.
        edits_inputs: Whether `before_forward` sets `ForwardBatch.input_embeds`.
        hidden_layers: Layers whose output is read after the forward pass.
        mirrored_pages: Pages of this capability that mirror those of the model's first KV group:
          same page numbers, moved and freed together. None: it has no pages.
    """

    name: ClassVar[str] = ""
    reads_rows: ClassVar[bool] = False
    edits_inputs: ClassVar[bool] = False
    in_layers: ClassVar[bool] = False
    hidden_layers: tuple[int, ...] = ()
    mirrored_pages: PagedBuffer | None = None

    @property
    def constraints(self) -> Constraints | None:
        """Token masks and the state behind them, if the capability constrains outputs."""
        return None

    @property
    def filler(self) -> Filler | None:
        """Computes steps in several forward passes, if the capability needs them (diffusion)."""
        return None

    @property
    def commands(self) -> Mapping[type[ExecutorCommand], Handler]:
        """Commands that this capability handles."""
        return {}

    def adapt(self, model: nn.Module) -> None:
        """Change layers of the model before it is traced, captured or run.

        Called again with a new model if tracing the first one failed.
        """

    def prepare(self, work: Any) -> None:
        """Called first in each step, because `join` in the same step may need data from `work`."""

    def join(self, join: Join) -> None:
        """A request enters a slot; a ValueError or similar fails this request only."""

    def leave(self, slot: int) -> None:
        """The request in `slot` has ended; the slot may never have been joined."""

    def before_forward(self, step: StepContext, work: Any) -> None:
        """Called before the model runs."""

    def before_head(self, rows: IntArray | torch.Tensor | None) -> None:
        """Called before the head runs on these rows; None for vectors outside the step.

        Step programs and graphs do not call it.
        """

    def after_forward(self, step: StepContext, work: Any) -> Report | None:
        """Called after the model has run, or was queued on a device."""
        return None

    def idle_step(self, work: Any) -> Report | None:
        """Called instead of the three hooks around the model, in a step without slices."""
        return None

    def after_result(self, step: StepContext, work: Any, result: StepResult) -> None:
        """Called when the step's result is on the host and verified, before `reports`."""

    def close(self) -> None:
        """Free resources before the executor ends."""


def heads_of(workers: tuple[CapabilityWorker, ...]) -> Callable[[Any], None]:
    """Call `before_head` of the workers that override it."""
    asked = overriding(workers, "before_head")

    def before_head(rows: IntArray | torch.Tensor | None) -> None:
        for worker in asked:
            worker.before_head(rows)

    return before_head


def overriding(workers: tuple[CapabilityWorker, ...], hook: str) -> tuple[CapabilityWorker, ...]:
    """Return the workers that override `hook`."""
    base = getattr(CapabilityWorker, hook)
    return tuple(w for w in workers if getattr(type(w), hook) is not base)
