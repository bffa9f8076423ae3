"""The sampler interface that the worker uses."""

from __future__ import annotations

from typing import Protocol

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch


class TokenSampler(Protocol):
    """Samples tokens from logits; each row independently of the others."""

    def sample(
        self, logits_RV: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None
    ) -> SampleOutput:
        """Sample one token for each row; overwrites the logits.

        All samplers edit logits in the same order: penalties, early stops, grammar masks, bias,
        custom processors, cleaning.
        """
        ...

    def token_logprobs(
        self, logits_PV: torch.Tensor, token_ids: IntArray, options: LogprobOptions
    ) -> TokenLogprobs:
        """Log probabilities of `token_ids` (P,), of the most likely ids, and of requested ids.

        Args:
            logits_PV: float32.
            token_ids: The token of each position.
            options: Requested ids; the server has rejected those beyond the vocabulary, and here
                they are clamped.
        """
        ...
