"""A virtual clock whose owner may set it: replicas run each at their own time."""

from __future__ import annotations


class ReplicaClock:
    """Time of one replica in seconds; moves forward only.

    Attributes:
        now_s: The time.
    """

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def reach(self, moment_s: float) -> None:
        """Move to a moment, unless it is past already."""
        self.now_s = max(self.now_s, moment_s)

    def advance(self, seconds: float) -> None:
        """Move forward."""
        self.now_s += seconds
