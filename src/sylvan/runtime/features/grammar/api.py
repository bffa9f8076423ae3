"""The interface of grammar libraries: compile, match, mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.features.grammar.spec import GrammarSpec


class GrammarMatcher(Protocol):
    """The state of one output in a grammar. Not thread-safe.

    The end token is not part of the text: it is never passed to `accept`, and `is_accepting` says
    whether it may come; its bit in masks is undefined.
    """

    def fill_mask(self, row: IntArray) -> bool:
        """Write the allowed next IDs into `row`; False: all are allowed, and `row` is undefined.

        `row` is int32 (ceil(vocabulary.size / 32),), C-contiguous; bit i of the row allows ID i.
        Does not change the state. Special IDs are allowed only where the grammar names
        them. Releases the GIL if the library can.
        """
        ...

    @staticmethod
    def fill_masks(matchers: Sequence[Any], bits: IntArray, rows: Sequence[int]) -> None:
        """Call `fill_mask` for several matchers of this class: row `rows[i]` of `bits` for each.

        `bits` is int32 (at least max(rows) + 1, ceil(vocabulary.size / 32)), C-contiguous. Rows of
        matchers that allow all IDs are all ones.
        """
        ...

    def accept(self, token: int) -> bool:
        """Advance by one token; False, without change, if the grammar does not allow it."""
        ...

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Advance by tokens up to the first that is not allowed; return how many were accepted."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ...

    def forced(self) -> bytes:
        """Return the longest text that must come next; empty if there is a choice.

        May be shorter than possible, and may end inside a character.
        """
        ...

    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        ...

    def is_terminated(self) -> bool:
        """Whether the output must end here: it is accepted, and nothing can follow."""
        ...

    def error(self) -> str:
        """Why the library gave up on this output (a limit was reached); empty if it did not."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar; immutable, shared by requests.

    Attributes:
        library: Name of the library that compiled it and loads the result of `dump`.
    """

    library: str

    def matcher(self) -> GrammarMatcher:
        """Make a matcher at the start state. Cheap."""
        ...

    def dump(self) -> bytes:
        """Serialise the grammar for `GrammarLoader.load`, in this or another process."""
        ...


class GrammarLoader(Protocol):
    """Loads compiled grammars. Several threads may load at once.

    Attributes:
        isolated: Whether grammars live in their own processes, so that loading blocks.
    """

    isolated: bool

    def load(self, data: bytes) -> CompiledGrammar:
        """Load the result of `CompiledGrammar.dump` by the same library version.

        Cheap if the library can serialise; otherwise known to be cheap, because it was done before.

        Raises:
            RequestError: It is of another version or vocabulary.
        """
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary.

    Attributes:
        grows_later: Whether automaton states are created during generation, so that its second
            argument limits their number. Other libraries create all states when compiling, under
            the limits on time and memory.
    """

    grows_later: bool

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. May take long, and much memory.

        Raises:
            RequestError: It is invalid or unsupported; the message is the library's.
        """
        ...


class GrammarLibrary(GrammarBackend, GrammarLoader, Protocol):
    """A library; loads what it compiled itself."""


def fill_each(matchers: Sequence[GrammarMatcher], bits: IntArray, rows: Sequence[int]) -> None:
    """Implement `GrammarMatcher.fill_masks` for libraries without batch calls."""
    for matcher, row in zip(matchers, rows, strict=True):
        if not matcher.fill_mask(bits[row]):
            bits[row] = -1


def accept_each(matcher: GrammarMatcher, tokens: Sequence[int]) -> int:
    """Implement `GrammarMatcher.accept_all` for libraries without batch calls."""
    for count, token in enumerate(tokens):
        if not matcher.accept(token):
            return count
    return len(tokens)


BackendMaker = Callable[..., GrammarBackend]
"""`BACKEND` of a module in `backends`; raises ConfigError if the library is missing."""

MAX_STATES = 50_000
"""Default limit of states in one grammar's automaton."""
