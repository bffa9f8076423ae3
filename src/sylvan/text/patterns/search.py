"""Searches text that arrives in parts for a regular expression.

Follows all possible matches at once, ordered by preference, so that it finds the same match as
Python's `re`, in time proportional to the length of the text times the number of states.
Transitions are cached, up to a limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from sylvan.text.patterns.compile import PatternProgram, compile_pattern
from sylvan.text.patterns.states import (
    Accept,
    Behind,
    ForkState,
    Look,
    Side,
    State,
    Take,
    holds,
    side,
)

_MAX_CLASSES = 4096
_WORDS_PER_STATE = 64  # size of the transition cache
_MIN_WORDS = 4096
_STEP_WORDS = 32
_UNKNOWN = side(word=False, ascii_word=False, newline=False)


@dataclass(frozen=True, slots=True, eq=False)
class _CharClass:
    """Characters that all predicates of an expression treat alike."""

    truths: tuple[bool, ...]
    side: Side


@dataclass(frozen=True, slots=True)
class _Step:
    """Transition on one character."""

    threads: _Threads
    sources: tuple[int, ...]
    matched: int | None


@dataclass(slots=True, eq=False)
class _Threads:
    """Current states, the preferred ones first, and their cached transitions."""

    states: tuple[int, ...]
    steps: dict[object, _Step] = field(default_factory=dict[object, _Step])


class Automaton:
    """An expression with its cached transitions; shared by all searches.

    Args:
        program: The compiled expression.
        behind: Whether it is a look-behind, for which only the end of a match counts.

    Attributes:
        size: Number of states.
        steps: Number of compile steps.
        matches_empty: Whether it matches the empty text.
        behinds: Automata of look-behind expressions.
        empty: Initial threads.
    """

    def __init__(self, program: PatternProgram, *, behind: bool = False) -> None:
        self.behinds = tuple(Automaton(inner, behind=True) for inner in program.behinds)
        self.size = program.size
        self.steps = program.steps
        self.matches_empty = not behind and _matches_empty(program)
        self.empty = _Threads(())
        self._program = program
        self._behind = behind
        self._looks = program.looks
        self._classes: dict[str, _CharClass] = {}
        self._alike: dict[object, _CharClass] = {}
        self._threads: dict[tuple[int, ...], _Threads] = {}
        self._max_words = _MIN_WORDS + _WORDS_PER_STATE * program.size
        self._words = 0

    def class_of(self, char: str) -> _CharClass:
        """The class of a character."""
        found = self._classes.get(char)
        if found is None:
            truths = tuple(predicate(char) for predicate in self._program.predicates)
            side = _side(char) if self._looks else _UNKNOWN
            found = self._alike.setdefault((truths, side), _CharClass(truths, side))
            if len(self._classes) >= _MAX_CLASSES:
                self._classes.clear()
            self._classes[char] = found
        return found

    def step(
        self,
        threads: _Threads,
        sides: tuple[Side | None, Side | None],
        kind: _CharClass | None,
        truths: tuple[bool, ...],
        *,
        begin: bool,
    ) -> _Step:
        """Consume a character of class `kind`, or None at the end of the text.

        Args:
            threads: The current states.
            sides: The characters on both sides of the position; None at an end of the text.
            kind: Class of the next character.
            truths: Whether each of `behinds` matches before the position.
            begin: Whether a match may start here.
        """
        key = (sides, kind, truths, begin)
        found = threads.steps.get(key)
        if found is None:
            found = self._step(threads, sides, kind, truths, begin=begin)
            self._words += _STEP_WORDS + 2 * len(found.sources)
            if self._words > self._max_words:
                self._forget()
            threads.steps[key] = found
        return found

    def _forget(self) -> None:
        for threads in self._threads.values():
            threads.steps.clear()
        self._threads.clear()
        self.empty.steps.clear()
        self._words = 0

    def _step(
        self,
        threads: _Threads,
        sides: tuple[Side | None, Side | None],
        kind: _CharClass | None,
        truths: tuple[bool, ...],
        *,
        begin: bool,
    ) -> _Step:
        states = self._program.states
        entries = [*threads.states, self._program.start] if begin else threads.states
        seen: set[int] = set()
        nexts: dict[int, int] = {}
        matched: int | None = None
        for source, entry in enumerate(entries):
            stack = [entry]
            while stack:
                number = stack.pop()
                if number in seen:
                    continue
                seen.add(number)
                state = states[number]
                if isinstance(state, Take):
                    if kind is not None and kind.truths[state.predicate]:
                        nexts.setdefault(state.next, source)
                elif not isinstance(state, Accept):
                    stack.extend(reversed(_nexts(state, sides, truths)))
                elif self._behind:
                    matched = source
                elif source < len(threads.states):  # else it is empty
                    return self._made(nexts, source)
        return self._made(nexts, matched)

    def _made(self, nexts: dict[int, int], matched: int | None) -> _Step:
        states = tuple(nexts)
        threads = self._threads.get(states) if states else self.empty
        if threads is None:
            threads = self._threads[states] = _Threads(states)
        return _Step(threads, tuple(nexts.values()), matched)


class _BehindSearch:
    """Searches for matches of an expression that end at the current position."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._threads = automaton.empty
        self._behinds = [_BehindSearch(inner) for inner in automaton.behinds]

    def take(self, sides: tuple[Side | None, Side | None], char: str | None) -> bool:
        """Whether it matches before the next character, which is then consumed."""
        truths = tuple([behind.take(sides, char) for behind in self._behinds])
        kind = self._automaton.class_of(char) if char is not None else None
        step = self._automaton.step(self._threads, sides, kind, truths, begin=True)
        if char is not None:
            self._threads = step.threads
        return step.matched is not None


class PatternSearch:
    """Searches one text for one expression."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._behinds = [_BehindSearch(inner) for inner in automaton.behinds]
        self._threads = automaton.empty
        self._starts: list[int] = []
        self._before: Side | None = None
        self._place = 0

    @property
    def pending(self) -> int | None:
        """Offset in the whole text of the start of the earliest match still possible."""
        return min(self._starts, default=None)

    def push(self, text: str) -> tuple[int, int] | None:
        """Add text; return the offsets of the match in the whole text so far, or None.

        Empty matches do not count. Do not push after a match.
        """
        found: tuple[int, int] | None = None
        last = len(text) - 1
        for i, char in enumerate(text):
            kind = self._automaton.class_of(char)
            after = kind.side
            if i == last and after.newline:
                after = side(word=False, ascii_word=False, newline=True, last=True)
            step = self._step(after, kind, char, begin=found is None)
            if step.matched is not None:
                found = (self._starts[step.matched], self._place)
            starts = [*self._starts, self._place]
            self._starts = [starts[source] for source in step.sources]
            self._threads = step.threads
            self._before = kind.side
            self._place += 1
        ended = self._step(None, None, None, begin=False)
        if ended.matched is not None:
            found = (self._starts[ended.matched], self._place)
        return found

    def _step(
        self, after: Side | None, kind: _CharClass | None, char: str | None, *, begin: bool
    ) -> _Step:
        sides = (self._before, after)
        truths = tuple([behind.take(sides, char) for behind in self._behinds])
        return self._automaton.step(self._threads, sides, kind, truths, begin=begin)


@functools.lru_cache(maxsize=256)
def automaton_of(text: str) -> Automaton:
    """The automaton of a regular expression.

    Raises:
        PatternError: it is not supported; says why.
    """
    return Automaton(compile_pattern(text))


def _matches_empty(program: PatternProgram) -> bool:
    """Whether an expression matches the empty text."""
    return _BehindSearch(Automaton(program, behind=True)).take((None, None), None)


def _nexts(
    state: State, sides: tuple[Side | None, Side | None], truths: Sequence[bool]
) -> tuple[int, ...]:
    match state:
        case ForkState(nexts=nexts):
            return nexts
        case Look(kind=kind, next=after):
            return (after,) if holds(kind, *sides) else ()
        case Behind(index=index, negate=negate, next=after):
            return (after,) if truths[index] != negate else ()
        case _:
            return ()


def _side(char: str) -> Side:
    word = char.isalnum() or char == "_"
    return side(word=word, ascii_word=word and char.isascii(), newline=char == "\n")
