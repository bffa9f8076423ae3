"""The reference sampler in PyTorch, for every device: processors, then `draw`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.draw import draw
from sylvan.runtime.sampling.logprobs import token_logprobs
from sylvan.runtime.sampling.output import NO_VALID_TOKEN, SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch
from sylvan.runtime.sampling.processors import (
    LogitsProcessor,
    add_bias,
    apply_masks,
    clean,
    forbid_early_stops,
    penalise,
)


class Sampler:
    """Implements `TokenSampler`: applies the processors in their fixed order, then draws."""

    def __init__(self, custom: Sequence[LogitsProcessor] = ()) -> None:
        self._custom = tuple(custom)

    @property
    def has_custom(self) -> bool:
        """Whether custom processors change logits."""
        return bool(self._custom)

    def sample(
        self, logits_RV: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None
    ) -> SampleOutput:
        if batch.plain and not self._custom:
            if masks is not None:
                apply_masks(logits_RV, masks)
            usable = logits_RV if _finite(logits_RV) else logits_RV.nan_to_num(float("-inf"))
            ids = usable.argmax(-1).cpu().numpy().astype(np.int32)
            return SampleOutput(ids, {}, _has_no_valid_token(usable, ids))
        for process in (penalise, forbid_early_stops):
            process(logits_RV, batch)
        if masks is not None:
            apply_masks(logits_RV, masks)
        for process in (add_bias, *self._custom, clean):
            process(logits_RV, batch)
        ids = draw(logits_RV, batch).cpu().numpy().astype(np.int32)
        errors = _has_no_valid_token(logits_RV, ids)
        return SampleOutput(ids, self._logprobs(logits_RV, ids, batch), errors)

    def token_logprobs(
        self, logits_PV: torch.Tensor, token_ids: IntArray, options: LogprobOptions
    ) -> TokenLogprobs:
        return token_logprobs(logits_PV, token_ids, options)

    def _logprobs(
        self, logits_RV: torch.Tensor, ids: IntArray, batch: SamplingBatch
    ) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        params = batch.params
        for row in np.flatnonzero(params.has_logprobs[batch.slots]).tolist():
            slot = batch.slots[row]
            options = params.logprobs[slot]
            assert options is not None
            logits = logits_RV[row : row + 1] / float(params.temperature[slot])
            found[row] = token_logprobs(logits, ids[row : row + 1], options)
        return found


def _finite(logits_RV: torch.Tensor) -> bool:
    return not bool(torch.isnan(logits_RV.amax())) if logits_RV.numel() else True


def _has_no_valid_token(logits_RV: torch.Tensor, ids: IntArray) -> dict[int, str]:
    """Errors of rows in which every token is masked out or NaN."""
    if not len(ids):
        return {}
    index = torch.from_numpy(ids.astype(np.int64)).to(logits_RV.device)
    best = logits_RV.gather(-1, index[:, None])[:, 0]
    bad = torch.nonzero(torch.isinf(best) & (best < 0))[:, 0].tolist()
    return dict.fromkeys(bad, NO_VALID_TOKEN)
