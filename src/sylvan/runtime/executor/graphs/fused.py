"""Runs a whole step in one native call: inputs, forward pass, sampling."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from sylvan.kernels.native.binding import StepInputs, StepRun
from sylvan.kernels.native.program import Program
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.sampling.api import SampleOutput
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native import NativeSamplingRows
from sylvan.runtime.sampling.params import SamplingSlots


class NativeStep:
    """Implements `FusedStep`: no Python runs between the plan's numbers and the sampled tokens.

    Args:
        program: A compiled model.
        run: Run-time arguments bound to the buffers of `batch`, owned by this object.
        batch: Limits and buffers; its counts follow the plans.
        logits_RV: Buffer of the program's logits, for the maximum number of rows.
        last_token: The newest token of each request slot, read and written by the call.
        params: Sampling parameters of the request slots.
    """

    def __init__(
        self,
        program: Program,
        run: StepRun,
        batch: ForwardBatch,
        logits_RV: torch.Tensor,
        last_token: IntArray,
        params: SamplingSlots,
    ) -> None:
        self._program, self._run, self._batch = program, run, batch
        self._logits_RV = logits_RV
        self._last_token = last_token
        self._rows = NativeSamplingRows(params, batch.limits.most_samples)
        self._rows.call.read(logits_RV.data_ptr(), logits_RV.stride(0))
        self._sample = ctypes.addressof(self._rows.call.struct)
        self._inputs = StepInputs(
            page_size=batch.kv.page_size,
            vocab=params.vocab_size,
            last_token=last_token.ctypes.data,
            shifts=batch.host.position_shifts.ctypes.data,
        )
        run.inputs = ctypes.addressof(self._inputs)
        limits = batch.limits
        # cached address of the plan buffer: asking an array for it takes longer than the copy
        self._numbers: IntArray = np.empty(
            5 * limits.max_reqs + limits.most_samples + limits.max_tokens, np.int32
        )
        self._inputs.numbers = self._numbers.ctypes.data
        self._typed = True  # whether any token's type may differ from 0

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> SampleOutput | None:
        inputs, batch = self._inputs, self._batch
        self._numbers[: len(plan.numbers)] = plan.numbers
        inputs.seqs = batch.num_reqs = plan.num_slices
        inputs.tokens = batch.num_tokens = plan.num_tokens
        inputs.outputs = batch.num_samples = plan.num_samples
        inputs.in_flight = plan.num_in_flight
        if plan.token_types is not None or self._typed:
            self._type(plan)
        if not draw:
            self._run.sample = None
            self._program.run(self._run)
            return None
        slots = plan.sample_slots
        self._rows.ready(slots)
        self._rows.mask(masks)
        self._run.sample = self._sample
        return self._rows.output(slots, self._program.run(self._run))

    def _type(self, plan: StepPlan) -> None:
        types = self._batch.host.token_types
        types[:] = 0
        if plan.token_types is not None:
            types[: plan.num_tokens] = plan.token_types
        self._typed = plan.token_types is not None

    def logits(self) -> torch.Tensor:
        return self._logits_RV[: self._batch.num_samples]
