"""Results of sampling, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs

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
