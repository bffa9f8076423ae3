"""Arguments and results of the native calls that sample rows of logits. No tensors."""

from __future__ import annotations

import numpy as np

from sylvan.kernels.native.sampling import SampleSlots
from sylvan.kernels.sample.sampler import LogprobRows, SampleCall, slot_table
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.output import NO_VALID_TOKEN, SampleOutput
from sylvan.runtime.sampling.params import SamplingSlots


class NativeSamplingRows:
    """Arguments of native sampling calls, which read one table of sampling parameters."""

    def __init__(self, params: SamplingSlots, max_rows: int) -> None:
        self.params = params
        self.max_rows = max_rows
        self.call = SampleCall(max_rows, params.vocab_size)
        self._table: SampleSlots | None = None
        self._counts: object = None
        self._logprob_rows: LogprobRows | None = None
        self._masked = False

    def ready(self, slots: IntArray) -> None:
        """Prepare the call for rows of these request slots."""
        params = self.params
        if params.counts.matrix is not self._counts:  # it has grown
            self._counts = params.counts.matrix
            self._table = slot_table(params.arrays())
            self.call.use(self._table)
        wanted = params.num_logprobs and params.has_logprobs[slots].any()
        if wanted:
            chosen = int(params.chosen_ids.lengths[slots].max())
            self._logprob_rows = LogprobRows(len(slots), int(params.top[slots].max()), chosen)
            self.call.collect_logprobs(self._logprob_rows)
        elif self._logprob_rows is not None:
            self._logprob_rows = None
            self.call.collect_logprobs(None)

    def mask(self, masks: Masks | None) -> None:
        """Set the token masks of the call; None: no row has one."""
        if masks is not None:
            self.call.mask(masks.rows, masks.bits)
            self._masked = True
        elif self._masked:
            self.call.mask(None, None)
            self._masked = False

    def output(self, slots: IntArray, num_failed: int) -> SampleOutput:
        """Return the results of the call."""
        count = len(slots)
        ids = self.call.ids[:count].copy()
        errors: dict[int, str] = {}
        if num_failed:
            errors = dict.fromkeys(
                np.flatnonzero(self.call.failed[:count]).tolist(), NO_VALID_TOKEN
            )
        logprobs = (
            {}
            if self._logprob_rows is None
            else self._logprobs(self._logprob_rows, slots, ids, errors)
        )
        return SampleOutput(ids, logprobs, errors)

    def _logprobs(
        self, found: LogprobRows, slots: IntArray, ids: IntArray, errors: dict[int, str]
    ) -> dict[int, TokenLogprobs]:
        wanted = self.params.logprobs
        return {
            row: logprobs_part(found, slice(row, row + 1), ids, options)
            for row, slot in enumerate(slots.tolist())
            if (options := wanted[slot]) is not None and row not in errors
        }


def logprobs_part(
    found: LogprobRows, rows: slice, token_ids: IntArray, options: LogprobOptions
) -> TokenLogprobs:
    """Select rows of the log probabilities, with as many alternatives as one request wants."""
    top = min(options.top, found.top.shape[1])
    return TokenLogprobs(
        token_ids=token_ids[rows],
        logprobs=found.own[rows].copy(),
        top_ids=found.top_ids[rows, :top].copy() if options.top else None,
        top_logprobs=found.top[rows, :top].copy() if options.top else None,
        chosen_logprobs=(
            found.chosen[rows, : len(options.token_ids)].copy() if options.token_ids else None
        ),
    )
