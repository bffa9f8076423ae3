"""A settable virtual clock, one per replica."""

from __future__ import annotations


class ReplicaClock:
    """The time of one replica in seconds; never decreases.

    Attributes:
        now_s: Current time.
    """

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def reach(self, moment_s: float) -> None:
        """Advance to a time, unless it has passed."""
        self.now_s = max(self.now_s, moment_s)

    def advance(self, seconds: float) -> None:
        """Advance by a duration."""
        self.now_s += seconds
