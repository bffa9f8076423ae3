"""What a grammar library is to the rest: compile, match, mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.grammar.spec import GrammarSpec


class GrammarMatcher(Protocol):
    """One output on its way through a grammar. Not thread-safe.

    The end token is no part of the text: it is never given to `accept`, and whether it may come
    is what `is_accepting` says; in masks its bit means nothing.
    """

    def fill_mask(self, row: IntArray) -> bool:
        """Write which ids may come next into `row`; False: all of them, and `row` is undefined.

        `row` is int32 (ceil(vocabulary.size / 32),), C-contiguous; bit i of the row allows id i.
        Does not change the state. Ids that are special are allowed only where the grammar names
        them. Releases the GIL while it works, where the library can.
        """
        ...

    @staticmethod
    def fill_masks(matchers: Sequence[Any], bits: IntArray, rows: Sequence[int]) -> None:
        """`fill_mask` for matchers of this class at once: row `rows[i]` of `bits` for each.

        `bits` is int32 (at least max(rows) + 1, ceil(vocabulary.size / 32)), C-contiguous. Rows of
        those that allow all ids are all ones.
        """
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token; False, changing nothing, if the grammar does not allow it."""
        ...

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Go on by tokens up to the first that is not allowed; how many were taken."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        ...

    def forced(self) -> bytes:
        """The longest text that has to come next, whatever is chosen; empty if there is a choice.

        May be shorter than what is possible, and may end inside a character.
        """
        ...

    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output has to end here: it is accepted, and nothing can follow."""
        ...

    def error(self) -> str:
        """Why the library gave up on this output (a limit was hit); empty if it did not."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for use; immutable, shared by requests.

    Attributes:
        library: Name of the library that compiled it, which loads what `dump` gives.
    """

    library: str

    def matcher(self) -> GrammarMatcher:
        """A matcher at the start. Cheap."""
        ...

    def dump(self) -> bytes:
        """What `GrammarLoader.load` makes the same grammar from, in this or another process."""
        ...


class GrammarLoader(Protocol):
    """Makes grammars that were compiled before. Several threads may load at once.

    Attributes:
        isolated: Whether grammars live in processes of their own, so that whoever loads one waits.
    """

    isolated: bool

    def load(self, data: bytes) -> CompiledGrammar:
        """What `CompiledGrammar.dump` gave, by the same version of the library.

        Cheap, where the library can serialise; else known to be cheap, since it was done before.

        Raises:
            RequestError: it is not from this version and vocabulary.
        """
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary.

    Attributes:
        grows_later: States of its automata are made while outputs are written, so that a limit on
            their number is its second argument. Others make all of them while they compile, where
            limits on time and memory hold.
    """

    grows_later: bool

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. May take long, and much memory.

        Raises:
            RequestError: it is not valid or not supported; the library's reason.
        """
        ...


class GrammarLibrary(GrammarBackend, GrammarLoader, Protocol):
    """A library; loads what it compiled itself."""


def fill_each(matchers: Sequence[GrammarMatcher], bits: IntArray, rows: Sequence[int]) -> None:
    """`GrammarMatcher.fill_masks` for libraries that do one at a time."""
    for matcher, row in zip(matchers, rows, strict=True):
        if not matcher.fill_mask(bits[row]):
            bits[row] = -1


def accept_each(matcher: GrammarMatcher, tokens: Sequence[int]) -> int:
    """`GrammarMatcher.accept_all` for libraries that do one at a time."""
    for count, token in enumerate(tokens):
        if not matcher.accept(token):
            return count
    return len(tokens)


BackendMaker = Callable[..., GrammarBackend]
"""`BACKEND` of a module in `backends`; raises ConfigError where the library is missing."""

MAX_STATES = 50_000
"""Of one grammar's automaton, as long as nothing else is asked for."""
