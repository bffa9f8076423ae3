"""Measures whether speculation pays off overall, instead of predicting it.

Each draft may promise more than it costs, and steps may still get slower: planning takes time
too, and the cost of rows is an estimate. So the time and tokens of steps with drafts are compared
with plain steps of as many requests. After a loss, drafting pauses; otherwise a few plain steps
now and then keep the measurement current.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64
"""Steps with drafts that are judged together."""
TOLERATED = 0.015
"""Share of the time that may be lost: futile lookups take a hundredth, so that texts that copy are
found."""
REST, LONGEST_REST = 128, 2048
"""Steps without drafts after a loss; doubled after each further loss."""
PROBE_EVERY, PROBE = 128, 3
"""Steps with drafts, and the plain steps after them that are measured."""
HELD_UP = 8.0
"""Multiple of a plain step's time at which a step counts as disturbed, and is clipped to it."""
SIZES = 24
"""Step sizes, by powers of two of requests, are judged separately."""


class Balance:
    """The balance for steps of about as many requests.

    Attributes:
        until: No drafts before the step with this number.
    """

    def __init__(self) -> None:
        self.until = 0
        self._plain_s: deque[float] = deque(maxlen=9)
        self._won_s = 0.0
        self._steps = 0  # of this window
        self._since_probe = 0
        self._rest = REST

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step, if known."""
        return statistics.median(self._plain_s) if self._plain_s else None

    def plain(self, seconds: float) -> None:
        """Record the time of a step planned without drafts."""
        self._plain_s.append(seconds)

    def right(self, share: float) -> None:
        """Record accepted drafts, each a saved step, as a share of a plain step's tokens."""
        self._won_s += share * (self.plain_s or 0.0)

    def guessing(self, seconds: float, number: int) -> None:
        """Record the time of a step with this number that had drafts, or looked for some."""
        plain_s = self.plain_s
        if plain_s is None:
            self._stop(number, PROBE)
            return
        self._won_s -= min(seconds, HELD_UP * plain_s) - plain_s
        self._steps += 1
        self._since_probe += 1
        if self._steps >= WINDOW:
            lost = self._won_s < -TOLERATED * self._steps * plain_s
            self._won_s, self._steps = 0.0, 0
            if lost:
                self._stop(number, self._rest)
                self._rest = min(2 * self._rest, LONGEST_REST)
                return
            self._rest = REST
        if self._since_probe >= PROBE_EVERY:
            self._stop(number, PROBE)

    def _stop(self, number: int, steps: int) -> None:
        self.until, self._since_probe = number + 1 + steps, 0


class Balances:
    """One balance per power of two of requests: large batches may lose where small ones win."""

    def __init__(self) -> None:
        self._every = tuple(Balance() for _ in range(SIZES))

    def of(self, num_reqs: int) -> Balance:
        """Return the balance for steps of this many requests."""
        return self._every[min(num_reqs.bit_length(), SIZES - 1)]
