"""Measures whether speculation saves time overall, instead of predicting it.

Even if each draft is expected to pay off, steps may get slower: planning takes time too, and the
cost of rows is an estimate. So time and tokens of steps with drafts are compared with those of
plain steps (without drafts) for as many requests. After a loss, drafting pauses. Otherwise an
occasional plain step keeps the measurement current.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64
"""Number of steps with drafts per comparison."""
TOLERATED_LOSS = 0.015
"""Share of the step time that may be lost before drafting pauses. Futile lookups alone take a
hundredth of it."""
REST, LONGEST_REST = 128, 2048
"""Steps without drafts after a loss; doubled after each further loss."""
PROBE_EVERY, PROBE = 128, 3
"""Steps with drafts, and the plain steps after them that are measured."""
DISTURBED = 8.0
"""Multiple of a plain step's time at which a step counts as disturbed, and is clipped to it."""
SIZES = 24
"""Number of balances, one per power of two of requests in a step."""


class Balance:
    """Time saved or lost by drafts in steps of about the same number of requests.

    Attributes:
        until: Number of the step before which there are no drafts.
    """

    def __init__(self) -> None:
        self.until = 0
        self._plain_s: deque[float] = deque(maxlen=9)
        self._saved_s = 0.0
        self._steps = 0  # of this window
        self._since_probe = 0
        self._rest = REST

    @property
    def plain_s(self) -> float | None:
        """Seconds of a plain step, if known."""
        return statistics.median(self._plain_s) if self._plain_s else None

    def record_plain(self, seconds: float) -> None:
        """Record the time of a step planned without drafts."""
        self._plain_s.append(seconds)

    def record_accepted(self, share: float) -> None:
        """Record accepted drafts, each a saved step, as a share of a plain step's tokens."""
        self._saved_s += share * (self.plain_s or 0.0)

    def record_drafting(self, seconds: float, number: int) -> None:
        """Record the time of a step with this number that had drafts, or looked for some."""
        plain_s = self.plain_s
        if plain_s is None:
            self._stop(number, PROBE)
            return
        self._saved_s -= min(seconds, DISTURBED * plain_s) - plain_s
        self._steps += 1
        self._since_probe += 1
        if self._steps >= WINDOW:
            lost = self._saved_s < -TOLERATED_LOSS * self._steps * plain_s
            self._saved_s, self._steps = 0.0, 0
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
