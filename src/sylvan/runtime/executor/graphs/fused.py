"""Runs a whole step of a program in one native call, sampling included."""

from __future__ import annotations

import torch

from sylvan.kernels.native.program import Program
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.graphs.native_step import NativeStep, StepBuffers
from sylvan.runtime.executor.graphs.step_states import StepStates
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingSlots


class ProgramStep:
    """Implements `FusedStep`.

    Args:
        program: The compiled model.
        batch: Limits and buffers of all steps; each plan updates its counts.
        logits_RV: Buffer of the program's logits, for the maximum number of rows.
        last_token: See `NativeStep`.
        params: Sampling parameters of the request slots.
        states: States of recurrent layers; None: the model has none.
    """

    def __init__(
        self,
        program: Program,
        batch: ForwardBatch,
        logits_RV: torch.Tensor,
        last_token: IntArray,
        params: SamplingSlots,
        states: StepStates | None = None,
    ) -> None:
        self._batch, self._logits_RV, self._states = batch, logits_RV, states
        self._step = NativeStep(
            program.run,
            StepBuffers(batch.host, batch.limits, batch.kv.page_size),
            (logits_RV.data_ptr(), logits_RV.stride(0)),
            last_token,
            params,
        )

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> SampleOutput | None:
        batch = self._batch
        batch.num_reqs, batch.num_tokens = plan.num_slices, plan.num_tokens
        batch.num_samples = plan.num_samples
        if self._states is not None and batch.state_work is not None:
            self._states.bind(self._step.arguments, batch.state_work)
        return self._step.run(plan, draw=draw, masks=masks)

    def logits(self) -> torch.Tensor:
        return self._logits_RV[: self._batch.num_samples]
