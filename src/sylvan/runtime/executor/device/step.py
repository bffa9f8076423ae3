"""A step under way on a device: what is to be read once its event is past."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.messages import TokenLogprobs
from sylvan.runtime.core.req import SliceOutput, StepResult
from sylvan.runtime.executor.device.logprobs import LogprobReader
from sylvan.runtime.executor.failures import failure
from sylvan.runtime.executor.plan import StepPlan
from sylvan.runtime.platform.api import Event
from sylvan.runtime.sampling.constraints import Outcome

HOPELESS = "no token is possible: all logits are forbidden or not a number"


@dataclass(slots=True, eq=False)
class DeviceStep:
    """What was launched. Slices are named by their index in the plan, rows by that in `samples`.

    `ids` is host memory that the sampled ids arrive in. `follow` lets constraints follow the ids;
    None if no row is constrained.
    """

    plan: StepPlan
    ids: torch.Tensor
    event: Event | None = None
    follow: Callable[[IntArray], dict[int, Outcome]] | None = None
    logprobs: dict[int, LogprobReader] = field(default_factory=dict)  # by row
    prompt: dict[int, tuple[LogprobReader, IntArray]] = field(default_factory=dict)  # by slice
    bad: dict[int, str] = field(default_factory=dict)  # slice -> why it cannot be sampled
    error: ExecutorError | None = None
    result: StepResult | None = None
    # What constraints made of the sampled ids: slot -> another newest token; (slot, id, +1 or -1)
    changed: dict[int, int] = field(default_factory=dict)
    recounts: list[tuple[int, int, float]] = field(default_factory=list)

    def done(self) -> bool:
        """See `Pending.done`."""
        return self.result is not None or self.event is None or self.event.done()

    def complete(self) -> None:
        """Wait for the device, and turn what arrived into a result; idempotent."""
        if self.result is not None or self.error is not None:
            return
        assert self.event is not None
        try:
            self.event.wait()
        except RuntimeError as error:
            self.error = failure(error)
            return
        self.result = StepResult(self._outputs())

    def wait(self) -> StepResult:
        """See `Pending.wait`."""
        self.complete()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def _outputs(self) -> list[SliceOutput]:
        plan = self.plan
        outputs = [SliceOutput() for _ in range(plan.num_slices)]
        ids = self.ids.numpy()[: len(plan.samples)].copy()
        outcomes = self.follow(ids) if self.follow else {}
        for row, (index, token) in enumerate(zip(plan.samples.tolist(), ids.tolist(), strict=True)):
            outputs[index] = self._sampled(row, index, token, outcomes.get(row))
        for index, (reader, token_ids) in self.prompt.items():
            outputs[index].prompt_logprobs = reader.read(token_ids)
        return outputs

    def _sampled(self, row: int, index: int, token: int, outcome: Outcome | None) -> SliceOutput:
        if why := self.bad.get(index):
            return SliceOutput(error=why)
        if outcome is not None:
            return self._constrained(row, index, token, outcome)
        if token < 0:
            return SliceOutput(error=HOPELESS)
        return SliceOutput(token_ids=(token,), logprobs=self._logprobs(row, token))

    def _constrained(self, row: int, index: int, token: int, outcome: Outcome) -> SliceOutput:
        if outcome.error:
            return SliceOutput(error=outcome.error)
        slot = int(self.plan.slots[index])
        self.recounts.append((slot, token, -1.0))  # the device has counted it
        self.recounts += [(slot, t, 1.0) for t in outcome.tokens]
        if not outcome.tokens:
            return SliceOutput(ended=outcome.ended)
        if outcome.tokens[0] != token:
            self.changed[slot] = outcome.tokens[0]
        elif token < 0:
            return SliceOutput(error=HOPELESS)
        return SliceOutput(
            token_ids=outcome.tokens, logprobs=self._logprobs(row, token), ended=outcome.ended
        )

    def _logprobs(self, row: int, token: int) -> TokenLogprobs | None:
        reader = self.logprobs.get(row)
        return None if reader is None else reader.read(np.array([token], np.int32))
