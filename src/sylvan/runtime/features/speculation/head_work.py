"""What the two halves of speculation by a draft head tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class TreeShape(NamedTuple):
    """Largest trees of guesses.

    Attributes:
        width: Guesses for each position; 1: they follow one another.
        nodes: Guesses of a tree.
    """

    width: int = 1
    nodes: int = 0


CHAIN = TreeShape()


class HeadWork(msgspec.Struct, frozen=True):
    """One step, slice by slice.

    Attributes:
        depths: Guesses wanted for what follows the token that the slice samples; 0: none.
        following: The token after the last one of a slice that samples none; -1 if there is none.
    """

    depths: Sequence[int]
    following: Sequence[int]


class HeadReport(msgspec.Struct, frozen=True):
    """What the head brought.

    Attributes:
        guesses: Of slices for which some were wanted, by index.
        guess_s: Seconds that it took to guess, all slices together.
        parents: Of those that are trees, as in `Draft`.
        failure: Why there are no guesses; empty: nothing failed.
    """

    guesses: dict[int, list[int]] = {}
    guess_s: float = 0.0
    parents: dict[int, list[int]] = {}
    failure: str = ""
