"""What a drafter is to the rest: something that continues a text, quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvan.runtime.core.req import Draft, Req
from sylvan.runtime.core.step import chain

GRADES = 24
"""Grades that a drafter can tell apart."""
SHARE_GRADES = 12
"""So many more are for guesses that were right with a known share of the texts they come from."""


def share_grade(share: float) -> int:
    """The grade of a guess that was right with this share, 0 to 1."""
    return GRADES + min(SHARE_GRADES - 1, int(share * SHARE_GRADES))


def rising(grade: int, count: int) -> Sequence[int]:
    """Grades of guesses that follow one another: each right one raises the next."""
    return [min(GRADES - 1, grade + i) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for the tokens that follow, one after another.

    `grade` says how much the drafter knows (0: least, at most `GRADES` - 1); guesses of a grade are
    right about equally often. Each guess that turns out to be right raises the grade by one.
    `parents` as in `Draft`, each before its children; empty: they follow one another.
    `grades`: of each guess; empty: they follow from `grade`.
    """

    tokens: tuple[int, ...] = ()
    grade: int = 0
    parents: tuple[int, ...] = ()
    grades: tuple[int, ...] = ()

    def each_grade(self) -> Sequence[int]:
        """Grades of the guesses, for a chain."""
        return self.grades or rising(self.grade, len(self.tokens))

    def draft(self, most: int) -> Draft:
        """The first guesses, at most so many."""
        count = min(most, len(self.tokens))
        parents = self.parents[:count] or chain(count)
        return Draft(self.tokens[:count], parents)


NOTHING = Proposal()

FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a drafter may raise, or make by nonsense: requests go on without its guesses."""


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


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start.

    Attributes:
        looks: Times that the drafter was asked.
        drafts: Proposals that were given to a step.
        failures: Times that the drafter raised, or returned nonsense.
    """

    looks: int = 0
    drafts: int = 0
    failures: int = 0


def depth_of(proposal: Proposal) -> int:
    """Tokens ahead that the deepest guess is."""
    if not proposal.parents:
        return len(proposal.tokens)
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(1 if not 0 <= parent < len(depths) else depths[parent] + 1)
    return max(depths, default=0)


def check(proposal: Proposal, most: int, vocab_size: int) -> None:
    """See that a proposal can be verified.

    Raises:
        ValueError: it has too many guesses, or ids that are none.
    """
    tokens = proposal.tokens
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise ValueError(f"guesses must be ids in 0..{vocab_size - 1}, not {tokens}")
    parents = proposal.parents
    if parents and (
        len(parents) != len(tokens) or not all(-1 <= p < i for i, p in enumerate(parents))
    ):
        raise ValueError(f"{parents} are no parents of {len(tokens)} guesses")
    if proposal.grades and len(proposal.grades) != len(tokens):
        raise ValueError(f"{len(proposal.grades)} grades for {len(tokens)} guesses")
    if len(tokens) > most or min(proposal.grade, *proposal.grades, 0) < 0:
        raise ValueError(f"{len(tokens)} guesses of grade {proposal.grade}, at most {most} fit")
