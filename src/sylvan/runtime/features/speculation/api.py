"""The interface of drafters, which continue a text quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvan.runtime.core.req import Draft, Req
from sylvan.runtime.core.step import chain

GRADES = 24
"""Number of grades that a drafter can distinguish."""
SHARE_GRADES = 12
"""Additional grades for drafts whose acceptance rate in their source texts is known."""


def share_grade(share: float) -> int:
    """Return the grade of a draft that was right with this share, 0 to 1."""
    return GRADES + min(SHARE_GRADES - 1, int(share * SHARE_GRADES))


def rising(grade: int, count: int) -> Sequence[int]:
    """Return the grades of consecutive drafts: each accepted one raises the next."""
    return [min(GRADES - 1, grade + i) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for the next tokens, in order.

    `grade` is the drafter's confidence (0: lowest, at most `GRADES` - 1); drafts of one grade have
    about the same acceptance rate. Each accepted draft raises the grade by one.
    `parents` as in `Draft`, each before its children; empty: a chain.
    `grades`: grade of each draft; empty: derived from `grade`.
    """

    tokens: tuple[int, ...] = ()
    grade: int = 0
    parents: tuple[int, ...] = ()
    grades: tuple[int, ...] = ()

    def each_grade(self) -> Sequence[int]:
        """Return the grades of the drafts of a chain."""
        return self.grades or rising(self.grade, len(self.tokens))

    def draft(self, limit: int) -> Draft:
        """Return the first drafts, at most this many."""
        count = min(limit, len(self.tokens))
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
"""Exceptions that a drafter may raise, or cause by bad output: requests then run without drafts."""


class Drafter(Protocol):
    """Continues the tokens of requests; called on the scheduler's thread.

    It may be wrong, return nonsense or raise: that only costs speed.
    """

    def propose(self, req: Req, limit: int) -> Proposal:
        """Return at most this many drafts that continue the known tokens of `req`."""
        ...

    def forget(self, req: Req) -> None:
        """Drop a finished request."""
        ...


@dataclass(slots=True)
class SpeculationCounts:
    """Counts since the start.

    Attributes:
        looks: Calls of the drafter.
        drafts: Proposals used in a step.
        failures: Times that the drafter raised, or returned nonsense.
    """

    looks: int = 0
    drafts: int = 0
    failures: int = 0


def depth_of(proposal: Proposal) -> int:
    """Return the depth of the deepest draft."""
    if not proposal.parents:
        return len(proposal.tokens)
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(1 if not 0 <= parent < len(depths) else depths[parent] + 1)
    return max(depths, default=0)


def check(proposal: Proposal, limit: int, vocab_size: int) -> None:
    """Check that a proposal can be verified.

    Raises:
        ValueError: It has too many drafts, or invalid IDs.
    """
    tokens = proposal.tokens
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise ValueError(f"drafts must be ids in 0..{vocab_size - 1}, not {tokens}")
    parents = proposal.parents
    if parents and (
        len(parents) != len(tokens) or not all(-1 <= p < i for i, p in enumerate(parents))
    ):
        raise ValueError(f"{parents} are no parents of {len(tokens)} drafts")
    if proposal.grades and len(proposal.grades) != len(tokens):
        raise ValueError(f"{len(proposal.grades)} grades for {len(tokens)} drafts")
    if len(tokens) > limit or min(proposal.grade, *proposal.grades, 0) < 0:
        raise ValueError(f"{len(tokens)} drafts of grade {proposal.grade}, at most {limit} fit")
