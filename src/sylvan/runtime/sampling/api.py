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
    """From logits to tokens. A row never sees another row."""

    def sample(
        self, logits_RV: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None
    ) -> SampleOutput:
        """Choose one token for each row; overwrites the logits.

        The order of what changes them is the contract's: penalties and early stops, the masks of
        grammars, the bias, custom processors, cleaning.
        """
        ...

    def token_logprobs(
        self, logits_PV: torch.Tensor, token_ids: IntArray, options: LogprobOptions
    ) -> TokenLogprobs:
        """Log probability of `token_ids` (P,), the most likely ids, and the ids asked for.

        Args:
            logits_PV: float32.
            token_ids: The token of each position.
            options: Numbers beyond the vocabulary were refused at the edge; here they are cut.
        """
        ...
