"""Results of sampling, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs

NO_VALID_TOKEN = "no token is valid: all logits are masked out or not a number"


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One token per row, requested log probabilities, and errors by row."""

    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]

    def done(self) -> bool:
        """Return True: the tokens are on the host."""
        return True

    def wait(self) -> SampleOutput:
        """Return itself at once."""
        return self
