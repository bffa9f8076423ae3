"""The outcome of one request, with timings."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are in seconds.

    Attributes:
        prompt_tokens: As the server counted, or else the data set.
        output_tokens: As the server counted; 0 if it did not.
        cached_tokens: Prompt tokens from the prefix cache.
        due_s: Scheduled sending time, from the start of the measurement.
        sent_s: Actual sending time.
        ttft_s: Time to first token; to the whole answer if it was not streamed.
        latency_s: Time to the end of the answer.
        gaps_s: Times between output tokens; tokens of one chunk share their gap.
        text: Generated text.
        error: Why it failed; "" on success.
        accept_length: Tokens per verification step of speculation, if the server reports it.
        turn: Index of its turn in a conversation.
    """

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    due_s: float = 0.0
    sent_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list[float])
    text: str = ""
    error: str = ""
    accept_length: float | None = None
    turn: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


class TokenTimer:
    """Converts the arrival of tokens to the times of an outcome.

    Args:
        outcome: The outcome to fill.
        sent_s: Sending time, by the clock of `tokens`.
    """

    def __init__(self, outcome: RequestRecord, sent_s: float) -> None:
        self.outcome = outcome
        self._sent_s = sent_s
        self._last_s = sent_s

    def tokens(self, count: int, now_s: float) -> None:
        """Record tokens that arrived together."""
        if count < 1:
            return
        if self._last_s == self._sent_s and not self.outcome.ttft_s:
            self.outcome.ttft_s = now_s - self._sent_s
        else:
            self.outcome.gaps_s += [(now_s - self._last_s) / count] * count
        self._last_s = now_s

    def end(self, now_s: float) -> None:
        """Record the end of the answer."""
        self.outcome.latency_s = now_s - self._sent_s
        if not self.outcome.ttft_s:
            self.outcome.ttft_s = self.outcome.latency_s
