"""The outcomes of all requests, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


@dataclass(slots=True)
class Outcomes:
    """One entry per request, in sending order. Times are in seconds.

    Attributes:
        due_s: Scheduled sending time; for later turns the actual one.
        sent_s: Actual sending time, from which durations count.
        first_s: When the client received its first token.
        end_s: When the client had received everything.
        prompt: Prompt tokens.
        output: Output tokens.
        cached: Prompt tokens from the prefix cache.
        retractions: Number of retractions.
        replica: Replica that served it.
        errors: Reasons of failures, by index.
    """

    due_s: list[float] = field(default_factory=list[float])
    sent_s: list[float] = field(default_factory=list[float])
    first_s: list[float] = field(default_factory=list[float])
    end_s: list[float] = field(default_factory=list[float])
    prompt: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])
    cached: list[int] = field(default_factory=list[int])
    retractions: list[int] = field(default_factory=list[int])
    replica: list[int] = field(default_factory=list[int])
    errors: dict[int, str] = field(default_factory=dict[int, str])

    def __len__(self) -> int:
        return len(self.sent_s)

    def add(self, due_s: float, sent_s: float, prompt: int) -> int:
        """Add a sent request; return its index."""
        self.due_s.append(due_s)
        self.sent_s.append(sent_s)
        self.prompt.append(prompt)
        for column in (self.first_s, self.end_s):
            column.append(0.0)
        for column in (self.output, self.cached, self.retractions, self.replica):
            column.append(0)
        return len(self.sent_s) - 1

    @property
    def done(self) -> NDArray[np.bool_]:
        """Which requests succeeded."""
        found = np.ones(len(self), np.bool_)
        found[list(self.errors)] = False
        return found

    @property
    def ttft_s(self) -> Column:
        """Time to first token of all requests."""
        return np.asarray(self.first_s) - np.asarray(self.sent_s)

    @property
    def latency_s(self) -> Column:
        """Time to the end of all requests."""
        return np.asarray(self.end_s) - np.asarray(self.sent_s)

    @property
    def tpot_s(self) -> Column:
        """Mean time per output token after the first, of all requests; 0 if there are none."""
        more = np.asarray(self.output) - 1
        spent = np.asarray(self.end_s) - np.asarray(self.first_s)
        return np.divide(spent, more, out=np.zeros(len(self)), where=more > 0)
