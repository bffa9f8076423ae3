"""The sampler interface that the worker uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.params import SamplingBatch

NO_VALID_TOKEN = "no token is possible: all logits are forbidden or not a number"


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One token a row, log probabilities where asked for, and what went wrong, by row."""

    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]

    def done(self) -> bool:
        """The tokens are here."""
        return True

    def wait(self) -> SampleOutput:
        """There is nothing to wait for."""
        return self


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
