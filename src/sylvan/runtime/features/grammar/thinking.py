"""Follows the thinking of one output: when it ends, and what ends it once its budget is spent."""

from __future__ import annotations

from sylvan.protocol.requests import Thinking


class ThoughtTracker:
    """Where one output is in its thinking.

    Attributes:
        over: The output thinks no more, or never did.
        due: Ids of the end marker that must come next, one after the other; empty while the output
            may think on.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._inside = thinking.inside
        self._seen: list[int] = []  # as many of the last tokens as the longest marker has
        self._spent = 0
        self.over = not thinking.ends
        self.due: tuple[int, ...] = ()
        self._check_budget()

    def follow(self, token: int) -> None:
        """Take in a token that was decided."""
        if self.over:
            return
        self._seen.append(token)
        if not self._inside:
            self._enter()
            return
        if any(tuple(self._seen[-len(end) :]) == end for end in self._thinking.ends):
            self.over, self.due = True, ()
        elif self.due:
            self.due = self.due[1:]
        else:
            self._spent += 1
            self._check_budget()
        longest = max(map(len, self._thinking.ends))
        self._seen = self._seen[-longest:]

    def _enter(self) -> None:
        """Thinking begins with the output or not at all."""
        seen = tuple(self._seen)
        if seen in self._thinking.starts:
            self._inside, self._seen = True, []
            self._check_budget()
        elif not any(start[: len(seen)] == seen for start in self._thinking.starts):
            self.over = True

    def _check_budget(self) -> None:
        budget = self._thinking.budget
        if self._inside and not self.over and budget is not None and self._spent >= budget:
            self.due = self._thinking.ends[0]
