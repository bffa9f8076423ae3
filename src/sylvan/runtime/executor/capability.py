"""Worker half of a capability: runs beside the model, driven by data in the step plan.

The control half is `sched.capability.Capability`; the two meet in `StepPlan.work` and
`StepResult.reports`, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.commands import ExecutorCommand
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import Join, StepPlan, StepResult
from sylvan.runtime.executor.backend import StepBackend
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.sampling.constraints import Constraints

Report = Callable[[], Any]
"""Makes the report of a step; called once its results have arrived."""
Handler = Callable[[Any], dict[str, Any]]
"""Carries out a command, and returns the body of its result; a ConfigError refuses it."""


@dataclass(slots=True, eq=False)
class StepContext:
    """One step as worker halves see it.

    Attributes:
        plan: What the step computes.
        may_use_graph: Whether a captured graph may be replayed.
        errors: Slice index -> why its request fails.
    """

    plan: StepPlan
    backend: StepBackend
    may_use_graph: bool = True
    errors: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def batch(self) -> ForwardBatch:
        """Inputs of the forward pass."""
        return self.backend.batch

    def logits(self, rows: IntArray) -> torch.Tensor:
        """Logits of any rows of the step, float32 (n, V); after the forward pass."""
        return self.backend.logits(rows)

    def hidden(self, rows: IntArray) -> torch.Tensor:
        """Hidden vectors after the final norm, float32 (n, D); after the forward pass."""
        return self.backend.hidden(rows)

    def layer_hidden(self, layer: int, rows: IntArray) -> torch.Tensor:
        """Output of a layer in `CapabilityWorker.hidden_layers`, (n, D); after the forward pass."""
        return self.backend.layer_hidden(layer, rows)

    def token_logprobs(
        self, rows: IntArray, token_ids: IntArray, options: LogprobOptions
    ) -> Callable[[], TokenLogprobs]:
        """Log probabilities of `token_ids` as rows of the step predict them.

        Returns: reads them, in a `Report`.
        """
        return self.backend.token_logprobs(rows, token_ids, options)

    @contextmanager
    def guard(self, index: int, what: str) -> Iterator[None]:
        """A failure inside fails the request of slice `index` only."""
        try:
            yield
        except FAILURES as error:
            self.errors[index] = f"{what}: {error}"


class CapabilityWorker:
    """Override the hooks it needs; `work` comes from the control half and is never None.

    The hooks around a step are called for steps that carry work for this capability only. Any of
    them may run before the step's results are on the host.

    Attributes:
        name: Of the capability.
        reads_rows: Whether `after_forward` reads logits or hidden vectors of rows that are not
            sampled; such a step is not replayed from a captured graph.
        edits_inputs: Whether `before_forward` sets `ForwardBatch.input_embeds`.
        hidden_layers: Layers whose output is read after the forward pass.
        beside: Its own pages, numbered as those of the model's first KV group and moved or freed
            with them; None without any.
    """

    name: ClassVar[str] = ""
    reads_rows: ClassVar[bool] = False
    edits_inputs: ClassVar[bool] = False
    hidden_layers: tuple[int, ...] = ()
    beside: PagedBuffer | None = None

    @property
    def constraints(self) -> Constraints | None:
        """Masks and follows sampled tokens, if the capability constrains outputs."""
        return None

    @property
    def commands(self) -> Mapping[type[ExecutorCommand], Handler]:
        """Commands that it carries out, beside the steps."""
        return {}

    def adapt(self, model: nn.Module) -> None:
        """The model is about to be recorded, captured or run: the last time to change its layers.

        Called again with another one where that turned out to be impossible.
        """

    def prepare(self, work: Any) -> None:
        """Called first in a step: `join` of the same step may need data from `work`."""

    def join(self, join: Join) -> None:
        """A request enters a slot; a failure (ValueError, ...) fails this request only."""

    def leave(self, slot: int) -> None:
        """The request in `slot` has ended; the slot may never have been joined."""

    def before_forward(self, step: StepContext, work: Any) -> None:
        """Before the model runs."""

    def before_head(self, rows: IntArray | torch.Tensor | None) -> None:
        """Called before the head runs on these rows; None: on vectors outside the step.

        Not called by step programs and graphs.
        """

    def after_forward(self, step: StepContext, work: Any) -> Report | None:
        """The model has run, or is queued on a device."""
        return None

    def idle_step(self, work: Any) -> Report | None:
        """Instead of the three hooks around the model, in a step without slices."""
        return None

    def after_result(self, step: StepContext, work: Any, result: StepResult) -> None:
        """The step's result is on the host and verified; called before `reports`."""

    def close(self) -> None:
        """The executor ends."""


def heads_of(workers: tuple[CapabilityWorker, ...]) -> Callable[[Any], None]:
    """Call `before_head` of the workers that override it."""
    asked = overriding(workers, "before_head")

    def before_head(rows: IntArray | torch.Tensor | None) -> None:
        for worker in asked:
            worker.before_head(rows)

    return before_head


def overriding(workers: tuple[CapabilityWorker, ...], hook: str) -> tuple[CapabilityWorker, ...]:
    """Workers that override a hook."""
    base = getattr(CapabilityWorker, hook)
    return tuple(w for w in workers if getattr(type(w), hook) is not base)
