"""How a worker has a step computed: inputs, forward pass and, where that can be, sampling."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.plan import StepPlan
from sylvan.runtime.sampling.api import SampleOutput
from sylvan.runtime.sampling.constraints import Masks


class Step(Protocol):
    """Computes plans, one after another."""

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> SampleOutput | None:
        """Compute all rows and store their KV.

        With `draw` nothing but `masks` stands between logits and tokens; whoever can then draws at
        once. Returns the tokens of `plan.samples`, or None if they are still to be drawn.
        """
        ...

    def logits(self) -> torch.Tensor:
        """Of `plan.samples`, float32 (S, V), after a run that returned None; to be overwritten."""
        ...


class Runs(Protocol):
    """The part of a runner that a step needs."""

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """See `GraphRunner.run`."""
        ...


class TensorStep:
    """Implements `Step` for any runner: fills the forward batch with numpy, draws nothing.

    Args:
        last_token: The newest token of each request slot, as kept by the worker.
    """

    def __init__(
        self, runner: Runs, batch: ForwardBatch, last_token: IntArray, vocab_size: int
    ) -> None:
        self._runner = runner
        self._batch = batch
        self._last_token = last_token
        self._vocab_size = vocab_size
        self._logits_RV = torch.empty(0)

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> None:
        """See `Step.run`."""
        self._fill(plan)
        with torch.inference_mode():
            self._logits_RV = self._runner.run(self._batch)

    def logits(self) -> torch.Tensor:
        """See `Step.logits`."""
        return self._logits_RV

    def _fill(self, plan: StepPlan) -> None:
        host, page_size = self._batch.host, self._batch.kv.page_size
        lens = plan.stops - plan.starts
        num_tokens, num_reqs = plan.num_tokens, plan.num_slices
        ends = np.cumsum(lens, dtype=np.int32)
        host.q_starts[0] = 0
        host.q_starts[1 : num_reqs + 1] = ends
        host.kv_lens[:num_reqs] = plan.stops
        host.req_slots[:num_reqs] = plan.slots
        host.sample_rows[: plan.num_samples] = ends[plan.samples] - 1
        ids = host.input_ids[:num_tokens]
        ids[:] = plan.input_ids
        ids[plan.in_flight] = self._last_token[plan.in_flight_slots]
        np.clip(ids, 0, self._vocab_size - 1, out=ids)  # whose were not fails alone
        host.token_types[:num_tokens] = 0 if plan.token_types is None else plan.token_types
        positions = host.positions[:num_tokens]
        positions[:] = np.arange(num_tokens, dtype=np.int32)
        positions -= np.repeat(ends - lens - plan.starts, lens)
        pages = host.page_table[np.repeat(plan.slots, lens), positions // page_size]
        host.out_slots[:num_tokens] = pages * page_size + positions % page_size
        self._batch.ready(num_tokens, num_reqs, plan.num_samples)
