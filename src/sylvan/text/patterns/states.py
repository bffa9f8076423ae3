"""States of an automaton that matches a regular expression."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Predicate = Callable[[str], bool]


class BoundaryKind(Enum):
    """Kinds of positions between two characters."""

    TEXT_START = "text start"
    TEXT_END = "text end"
    LINE_START = "line start"
    LINE_END = "line end"
    LAST_LINE_END = "end of the last line"
    BOUNDARY = "word boundary"
    NO_BOUNDARY = "no word boundary"
    ASCII_BOUNDARY = "ASCII word boundary"
    NO_ASCII_BOUNDARY = "no ASCII word boundary"


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Properties of the character next to a position; one object per combination.

    Attributes:
        word: Whether it is a word character.
        ascii_word: Whether it is an ASCII word character.
        newline: Whether it is a line feed.
        last: Whether it is the last one so far.
    """

    word: bool
    ascii_word: bool
    newline: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Take:
    """Consumes one character that satisfies predicate number `predicate`."""

    predicate: int
    next: int


@dataclass(frozen=True, slots=True)
class ForkState:
    """Continues in several states, the preferred one first."""

    nexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Continues if the position is of the given kind."""

    kind: BoundaryKind
    next: int


@dataclass(frozen=True, slots=True)
class Behind:
    """Continues if automaton `index` matches the preceding text, or with `negate` if not."""

    index: int
    negate: bool
    next: int


@dataclass(frozen=True, slots=True)
class Accept:
    """The expression has matched."""


State = Take | ForkState | Look | Behind | Accept


@functools.cache
def side(*, word: bool, ascii_word: bool, newline: bool, last: bool = False) -> Side:
    """The object for a combination of properties."""
    return Side(word, ascii_word, newline, last)


def holds(kind: BoundaryKind, before: Side | None, after: Side | None) -> bool:
    """Whether a position is of a kind; a side is None at an end of the text."""
    if kind in _BOUNDARIES:
        name, wanted = _BOUNDARIES[kind]
        left = before is not None and getattr(before, name)
        right = after is not None and getattr(after, name)
        return (left != right) == wanted
    if kind in (BoundaryKind.TEXT_START, BoundaryKind.LINE_START):
        return before is None or (kind is BoundaryKind.LINE_START and before.newline)
    if after is None:
        return True
    return after.newline and (
        kind is BoundaryKind.LINE_END or (kind is BoundaryKind.LAST_LINE_END and after.last)
    )


_BOUNDARIES = {
    BoundaryKind.BOUNDARY: ("word", True),
    BoundaryKind.NO_BOUNDARY: ("word", False),
    BoundaryKind.ASCII_BOUNDARY: ("ascii_word", True),
    BoundaryKind.NO_ASCII_BOUNDARY: ("ascii_word", False),
}
