"""Samples all rows of a step on the CPU in one native call."""

from __future__ import annotations

import torch

from sylvan.kernels.native.library import Library
from sylvan.kernels.sample.sampler import logprobs_of, sample
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native_rows import NativeSamplingRows, logprobs_part
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch


class NativeSampler:
    """Implements `TokenSampler` for logits in host memory; runs no custom processors."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._rows: NativeSamplingRows | None = None

    def sample(
        self, logits_RV: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None
    ) -> SampleOutput:
        count = len(batch.slots)
        rows = self._rows
        if rows is None or rows.params is not batch.params or rows.max_rows < count:
            rows = self._rows = NativeSamplingRows(
                batch.params, max(count, len(batch.params.greedy))
            )
        call = rows.call
        assert logits_RV.stride(1) == 1
        call.read(logits_RV.data_ptr(), logits_RV.stride(0))
        call.slots[:count], call.positions[:count] = batch.slots, batch.positions
        call.struct.rows = count
        rows.ready(batch.slots)
        rows.mask(masks)
        return rows.output(batch.slots, sample(self._library, call))

    def token_logprobs(
        self, logits_PV: torch.Tensor, token_ids: IntArray, options: LogprobOptions
    ) -> TokenLogprobs:
        found = logprobs_of(
            self._library,
            logits_PV.numpy(),
            token_ids,
            alternatives=min(options.top, logits_PV.shape[1]),
            chosen_ids=options.token_ids,
        )
        return logprobs_part(found, slice(0, len(token_ids)), token_ids, options)
