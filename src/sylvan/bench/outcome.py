"""What became of one request, and when."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are in seconds.

    Attributes:
        prompt_tokens: As the server counted, or else as the data set did.
        output_tokens: As the server counted; 0 as long as it has not.
        cached_tokens: Tokens of the prompt that came from the prefix cache.
        due_s: When it should have been sent, from the start of the measurement.
        sent_s: When it was sent.
        ttft_s: From sending it to the first token; to the whole answer if it was no stream.
        latency_s: From sending it to the end of the answer.
        gaps_s: Between output tokens; tokens that came together share their gap.
        text: What was generated.
        error: Why it failed; "" if it did not.
        accept_length: Tokens that speculation got from a pass, if the server says.
        turn: Number of its turn in a conversation.
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
        """Mean time of an output token after the first."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


class Reception:
    """Turns the arrival of tokens into the times of an outcome.

    Args:
        outcome: What is filled.
        sent_s: When the request was sent, by the clock of `tokens`.
    """

    def __init__(self, outcome: RequestRecord, sent_s: float) -> None:
        self.outcome = outcome
        self._sent_s = sent_s
        self._last_s = sent_s

    def tokens(self, count: int, now_s: float) -> None:
        """So many tokens came, at once."""
        if count < 1:
            return
        if self._last_s == self._sent_s and not self.outcome.ttft_s:
            self.outcome.ttft_s = now_s - self._sent_s
        else:
            self.outcome.gaps_s += [(now_s - self._last_s) / count] * count
        self._last_s = now_s

    def end(self, now_s: float) -> None:
        """The answer is whole."""
        self.outcome.latency_s = now_s - self._sent_s
        if not self.outcome.ttft_s:
            self.outcome.ttft_s = self.outcome.latency_s
