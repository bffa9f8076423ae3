"""What a drafter is to the rest: something that continues a text, quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sylvan.runtime.core.req import Req


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for the tokens that follow, one after another.

    `grade` says how much the drafter knows (0: least, at most `GRADES` - 1); guesses of a grade are
    right about equally often. Each guess that turns out to be right raises the grade by one.
    """

    tokens: tuple[int, ...] = ()
    grade: int = 0


GRADES = 24
"""Grades that a drafter can tell apart."""

NOTHING = Proposal()


class Drafter(Protocol):
    """Continues the tokens of requests; called on the scheduler's thread.

    It may be wrong, return nonsense or raise: that costs speed only.
    """

    def propose(self, req: Req, most: int) -> Proposal:
        """At most so many guesses for what follows the known tokens of `req`."""
        ...

    def forget(self, req: Req) -> None:
        """`req` has ended."""
        ...
