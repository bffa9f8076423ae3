"""llguidance, with xgrammar for what it does not support: `auto` when both are installed."""

from __future__ import annotations

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import MAX_STATES, CompiledGrammar, GrammarBackend
from sylvan.runtime.features.grammar.backends.llguidance import LLGuidance
from sylvan.runtime.features.grammar.backends.xgrammar import XGrammar
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.runtime.features.grammar.vocabulary import Vocabulary


class Combined:
    """See `GrammarBackend`. Errors are those of the first library."""

    grows_later = True

    def __init__(self, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> None:
        self._first: GrammarBackend = LLGuidance(vocabulary, max_states)
        self._second: GrammarBackend = XGrammar(vocabulary)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            return self._first.compile(spec)
        except NotSupportedError as refusal:
            try:
                return self._second.compile(spec)
            except RequestError:
                raise refusal from None


BACKEND = Combined
