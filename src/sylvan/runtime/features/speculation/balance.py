"""Whether guessing pays all in all: measured, not expected.

Each guess may promise more than it costs, and steps still bring less: planning them takes time,
too, and what rows cost is an estimate. So what steps with guesses took and brought is compared with
plain steps of as many requests. Where that is a loss nothing is guessed for a while; where it is
not, a few plain steps now and then keep the measure of them new.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 64
"""Steps with guesses that are judged together."""
TOLERATED = 0.015
"""Share of the time that may be lost: looks in vain take a hundredth, so that a text that copies is
seen."""
REST, LONGEST_REST = 128, 2048
"""Steps without guesses after a loss; twice as many after the next one."""
PROBE_EVERY, PROBE = 128, 3
"""Steps with guesses, and the plain ones after them that are measured."""
HELD_UP = 8.0
"""What took so many times as long as a plain step was held up by others: it counts as that."""
SIZES = 24
"""Powers of two of requests in a step, which are judged apart."""


class Balance:
    """Of steps of about as many requests.

    Attributes:
        until: No guesses before the step of this number.
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
        """What a plain step takes, if that is known."""
        return statistics.median(self._plain_s) if self._plain_s else None

    def plain(self, seconds: float) -> None:
        """A step took so long that was planned without guesses."""
        self._plain_s.append(seconds)

    def right(self, share: float) -> None:
        """Right guesses: tokens that needed no step, as a share of those of a plain step."""
        self._won_s += share * (self.plain_s or 0.0)

    def guessing(self, seconds: float, number: int) -> None:
        """The step of this number took so long; guesses were made in it, or looked for."""
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
    """One for each power of two of requests: what loses in a large batch may win in a small one."""

    def __init__(self) -> None:
        self._every = tuple(Balance() for _ in range(SIZES))

    def of(self, num_reqs: int) -> Balance:
        """That of steps of so many requests."""
        return self._every[min(num_reqs.bit_length(), SIZES - 1)]
