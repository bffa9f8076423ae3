"""Compiles regular expressions (as parsed by Python's `re`) to automata of bounded size."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.text.patterns.states import (
    Accept,
    Behind,
    BoundaryKind,
    ForkState,
    Look,
    Predicate,
    State,
    Take,
)

MAX_STATES = 1024
MAX_STEPS = 4 * MAX_STATES
"""Limit on compile steps; parts that match nothing add no states."""

_parser: Any = importlib.import_module("re._parser")  # this module has no public name
_NO_AUTOMATON = {
    "ASSERT": "lookahead",
    "ASSERT_NOT": "lookahead",
    "ATOMIC_GROUP": "an atomic group",
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
_CATEGORIES: dict[str, Predicate] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda char: char.isalnum() or char == "_",
}


_KINDS = {
    "AT_BEGINNING": (BoundaryKind.TEXT_START, BoundaryKind.LINE_START, re.MULTILINE),
    "AT_BEGINNING_STRING": (BoundaryKind.TEXT_START, BoundaryKind.TEXT_START, 0),
    "AT_END": (BoundaryKind.LAST_LINE_END, BoundaryKind.LINE_END, re.MULTILINE),
    "AT_END_STRING": (BoundaryKind.TEXT_END, BoundaryKind.TEXT_END, 0),
    "AT_BOUNDARY": (BoundaryKind.BOUNDARY, BoundaryKind.ASCII_BOUNDARY, re.ASCII),
    "AT_NON_BOUNDARY": (BoundaryKind.NO_BOUNDARY, BoundaryKind.NO_ASCII_BOUNDARY, re.ASCII),
}
"""Boundary kinds without a flag and with it, and the flag."""


class PatternError(Exception):
    """A regular expression is malformed, too large, or cannot be matched in linear time."""


@dataclass(frozen=True, slots=True)
class PatternProgram:
    """A compiled expression.

    Attributes:
        states: The states; number 0 accepts.
        start: The initial state.
        predicates: Predicates of characters; states refer to them by index.
        behinds: Programs of look-behind expressions.
        steps: Number of compile steps.
    """

    states: tuple[State, ...]
    start: int
    predicates: tuple[Predicate, ...]
    behinds: tuple[PatternProgram, ...]
    steps: int

    @property
    def size(self) -> int:
        """Number of states, including those of `behinds`."""
        return len(self.states) + sum(behind.size for behind in self.behinds)

    @property
    def looks(self) -> bool:
        """Whether it tests positions."""
        looks = any(isinstance(state, Look) for state in self.states)
        return looks or any(behind.looks for behind in self.behinds)


def compile_pattern(text: str) -> PatternProgram:
    """Compile a regular expression.

    Raises:
        PatternError: names the error.
    """
    try:
        tree = _parser.parse(text)
    except (re.error, ValueError, OverflowError) as error:
        raise PatternError(f"is not a valid regular expression: {error}") from error
    except RecursionError as error:
        raise PatternError("is nested too deeply") from error
    return _Compiler(_Room()).program(tree, tree.state.flags)


class _Room:
    """Remaining states and steps, shared by all parts of an expression."""

    def __init__(self) -> None:
        self.states = MAX_STATES
        self.steps = MAX_STEPS

    def take(self, *, states: int = 0) -> None:
        self.states -= states
        self.steps -= 1
        if self.states < 0 or self.steps < 0:
            raise PatternError(f"needs an automaton of more than {MAX_STATES} states")


class _Compiler:
    """Compiles from end to start, so that each state knows its successor."""

    def __init__(self, room: _Room) -> None:
        self._room = room
        self._states: list[State] = [Accept()]
        self._predicates: dict[Any, int] = {}
        self._made: list[Predicate] = []
        self._behinds: list[PatternProgram] = []

    def program(self, tree: Any, flags: int) -> PatternProgram:
        start = self._sequence(tree, flags, 0)
        steps = MAX_STEPS - self._room.steps
        return PatternProgram(
            tuple(self._states), start, tuple(self._made), tuple(self._behinds), steps
        )

    def _add(self, state: State) -> int:
        self._room.take(states=1)
        self._states.append(state)
        return len(self._states) - 1

    def _sequence(self, items: Any, flags: int, after: int) -> int:
        for op, value in reversed(list(items)):
            after = self._item(str(op), value, flags, after)
        return after

    def _item(self, op: str, value: Any, flags: int, after: int) -> int:
        self._room.take()
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._add(Take(self._predicate(op, value, flags), after))
            case "AT":
                return self._add(Look(_kind(str(value), flags), after))
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(value, flags, after, greedy=op == "MAX_REPEAT")
            case "ASSERT" | "ASSERT_NOT" if value[0] < 0:
                return self._behind(value[1], flags, after, negate=op == "ASSERT_NOT")
            case _:
                return self._group(op, value, flags, after)

    def _group(self, op: str, value: Any, flags: int, after: int) -> int:
        if op == "SUBPATTERN":
            _, added, removed, inner = value
            return self._sequence(inner, (flags | added) & ~removed, after)
        if op == "BRANCH":
            entries = tuple(self._sequence(branch, flags, after) for branch in value[1])
            return self._add(ForkState(entries))
        raise PatternError(f"uses {_NO_AUTOMATON[op]}, which this server does not support")

    def _repeat(self, value: Any, flags: int, after: int, *, greedy: bool) -> int:
        least, most, inner = value
        if most is _parser.MAXREPEAT:
            loop = self._add(Accept())  # a placeholder until the repeated part is compiled
            entry = self._sequence(inner, flags, loop)
            self._states[loop] = ForkState((entry, after) if greedy else (after, entry))
            after = loop
        else:
            out = after
            for _ in range(most - least):
                self._room.take()
                entry = self._sequence(inner, flags, after)
                after = self._add(ForkState((entry, out) if greedy else (out, entry)))
        for _ in range(least):
            self._room.take()
            after = self._sequence(inner, flags, after)
        return after

    def _behind(self, inner: Any, flags: int, after: int, *, negate: bool) -> int:
        self._behinds.append(_Compiler(self._room).program(inner, flags))
        return self._add(Behind(len(self._behinds) - 1, negate, after))

    def _predicate(self, op: str, value: Any, flags: int) -> int:
        key = (op, str(value), flags)
        if key not in self._predicates:
            self._predicates[key] = len(self._made)
            self._made.append(_predicate(op, value, flags))
        return self._predicates[key]


def _kind(at: str, flags: int) -> BoundaryKind:
    usual, with_flag, flag = _KINDS[at]
    return with_flag if flags & flag else usual


def _predicate(op: str, value: Any, flags: int) -> Predicate:
    match op:
        case "ANY":
            return _anything if flags & re.DOTALL else _no_newline
        case "LITERAL" | "NOT_LITERAL":
            found = _folded(functools.partial(_equals, chr(value)), flags)
            return _negated(found) if op == "NOT_LITERAL" else found
        case _:
            return _set(value, flags)


def _set(items: Sequence[tuple[Any, Any]], flags: int) -> Predicate:
    negate = str(items[0][0]) == "NEGATE"
    members = [_member(str(op), value, flags) for op, value in items[negate:]]

    def found(char: str) -> bool:
        return any(member(char) for member in members)

    return _negated(found) if negate else found


def _member(op: str, value: Any, flags: int) -> Predicate:
    match op:
        case "LITERAL":
            return _folded(functools.partial(_equals, chr(value)), flags)
        case "RANGE":
            return _folded(functools.partial(_between, chr(value[0]), chr(value[1])), flags)
        case _:
            return _category(str(value), flags)


def _category(name: str, flags: int) -> Predicate:
    name = name.removeprefix("CATEGORY_")
    found = _CATEGORIES[name.removeprefix("NOT_")]
    if flags & re.ASCII:
        found = functools.partial(_in_ascii, found)
    return _negated(found) if name.startswith("NOT_") else found


def _folded(found: Predicate, flags: int) -> Predicate:
    return functools.partial(_in_any_case, found) if flags & re.IGNORECASE else found


def _negated(found: Predicate) -> Predicate:
    return lambda char: not found(char)


def _anything(_: str) -> bool:
    return True


def _no_newline(char: str) -> bool:
    return char != "\n"


def _equals(wanted: str, char: str) -> bool:
    return char == wanted


def _between(first: str, last: str, char: str) -> bool:
    return first <= char <= last


def _in_ascii(found: Predicate, char: str) -> bool:
    return char.isascii() and found(char)


def _in_any_case(found: Predicate, char: str) -> bool:
    return found(char) or any(
        len(other) == 1 and found(other) for other in (char.lower(), char.upper())
    )
