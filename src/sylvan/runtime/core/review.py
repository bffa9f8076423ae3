"""Tokens under review: a capability may still roll them back, so they are not sent yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from sylvan.protocol.logprobs import cut, join
from sylvan.protocol.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Review:
    """A capability's decision on the newest tokens of a request; counts include the prompt.

    Attributes:
        kept: Tokens to keep; later ones are rolled back and sampled again.
        final: Leading tokens that are final.
    """

    kept: int
    final: int


@dataclass(slots=True, eq=False)
class ReviewState:
    """State of a request whose tokens a capability reviews before they are sent.

    Attributes:
        final: Number of final tokens, including the prompt.
        taken_back: Number of sampled tokens that were rolled back.
    """

    final: int
    taken_back: int = 0
    _logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    def keep(self, logprobs: TokenLogprobs | None) -> None:
        """Store log probabilities of the newest tokens until these are sent."""
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def drop(self, count: int) -> None:
        """Roll back the newest `count` tokens."""
        self.taken_back += count
        if self._logprobs:
            known = join(self._logprobs)
            self._logprobs = [cut(known, 0, max(0, len(known.token_ids) - count))]

    def take(self, count: int) -> TokenLogprobs | None:
        """Remove and return the log probabilities of the oldest `count` unsent tokens."""
        if not self._logprobs:
            return None
        known = join(self._logprobs)
        rest = cut(known, count, len(known.token_ids))
        self._logprobs = [rest] if len(rest.token_ids) else []
        return cut(known, 0, count)
