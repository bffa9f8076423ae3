"""llguidance, and xgrammar for what llguidance cannot do: what `auto` stands for with both."""

from __future__ import annotations

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import (
    MAX_STATES,
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
)
from sylvan.runtime.features.grammar.backends.llguidance import LLGuidance
from sylvan.runtime.features.grammar.backends.xgrammar import XGrammar
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.runtime.features.grammar.vocabulary import Vocabulary

_FIRST, _SECOND = b"l", b"x"  # which library a dump is from


class Combined:
    """See `GrammarBackend`. Refusals are those of the library that is asked first."""

    loads_unlocked = False
    grows_later = True

    def __init__(self, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> None:
        self._libraries: dict[bytes, GrammarBackend] = {
            _FIRST: LLGuidance(vocabulary, max_states),
            _SECOND: XGrammar(vocabulary),
        }

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """See `GrammarBackend.compile`."""
        try:
            return _Compiled(_FIRST, self._libraries[_FIRST].compile(spec))
        except NotSupportedError as refusal:
            try:
                return _Compiled(_SECOND, self._libraries[_SECOND].compile(spec))
            except RequestError:
                raise refusal from None

    def load(self, data: bytes) -> CompiledGrammar:
        """See `GrammarBackend.load`."""
        library = self._libraries.get(data[:1])
        if library is None:
            raise RequestError("the compiled grammar is from another library")
        return _Compiled(data[:1], library.load(data[1:]))


class _Compiled:
    """A grammar, and which library compiled it."""

    def __init__(self, mark: bytes, grammar: CompiledGrammar) -> None:
        self._mark, self._grammar = mark, grammar

    def matcher(self) -> GrammarMatcher:
        """See `CompiledGrammar.matcher`."""
        return self._grammar.matcher()

    def dump(self) -> bytes:
        """See `CompiledGrammar.dump`."""
        return self._mark + self._grammar.dump()


BACKEND = Combined
