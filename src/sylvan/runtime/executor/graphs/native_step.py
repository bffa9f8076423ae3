"""A whole step in one native call: inputs, forward pass, sampling. No tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sylvan.kernels.native.binding import StepInputs, StepRun
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.host import BatchLimits, HostArrays
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.graphs.arguments import run_arguments
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native_rows import NativeSamplingRows
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingSlots


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Buffers of all steps.

    Attributes:
        host: Inputs.
        limits: Sizes of the buffers.
        page_size: Tokens of a page of KV.
    """

    host: HostArrays
    limits: BatchLimits
    page_size: int


class NativeStep:
    """Runs a step in one native call, from the plan's numbers to the sampled tokens.

    Args:
        run: Runs a compiled model; returns the number of sampled rows without a valid token.
        buffers: Buffers of all steps.
        logits: Address of the program's logits, and the stride of their rows in float32 numbers.
        last_token: The newest token of each request slot, read and written by the call.
        params: Sampling parameters of the request slots.
    """

    def __init__(
        self,
        run: Callable[[StepRun], int],
        buffers: StepBuffers,
        logits: tuple[int, int],
        last_token: IntArray,
        params: SamplingSlots,
    ) -> None:
        self._call, self._host = run, buffers.host
        host, limits = buffers.host, buffers.limits
        self._run = run_arguments(host)
        self._last_token = last_token
        self._rows = NativeSamplingRows(params, limits.max_sampled_rows)
        self._rows.call.read(*logits)
        self._sample = ctypes.addressof(self._rows.call.struct)
        self._inputs = StepInputs(
            page_size=buffers.page_size,
            vocab=params.vocab_size,
            last_token=last_token.ctypes.data,
            shifts=host.position_shifts.ctypes.data,
        )
        self._run.inputs = ctypes.addressof(self._inputs)
        # cached address of the plan buffer: reading it from the array takes longer than the copy
        self._numbers: IntArray = np.empty(
            5 * limits.max_reqs + limits.max_sampled_rows + limits.max_tokens, np.int32
        )
        self._inputs.numbers = self._numbers.ctypes.data
        self._typed = True  # whether the buffer of token types may hold other numbers than 0

    @property
    def arguments(self) -> StepRun:
        """Return the arguments of the next run, except its plan."""
        return self._run

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> SampleOutput | None:
        """See `FusedStep.run`."""
        inputs = self._inputs
        self._numbers[: len(plan.numbers)] = plan.numbers
        inputs.seqs, inputs.tokens = plan.num_slices, plan.num_tokens
        inputs.outputs, inputs.in_flight = plan.num_samples, plan.num_in_flight
        if plan.token_types is not None or self._typed:
            self._type(plan)
        if not draw:
            self._run.sample = None
            self._call(self._run)
            return None
        slots = plan.sample_slots
        self._rows.ready(slots)
        self._rows.mask(masks)
        self._run.sample = self._sample
        return self._rows.output(slots, self._call(self._run))

    def _type(self, plan: StepPlan) -> None:
        types = self._host.token_types
        types[:] = 0
        if plan.token_types is not None:
            types[: plan.num_tokens] = plan.token_types
        self._typed = plan.token_types is not None
