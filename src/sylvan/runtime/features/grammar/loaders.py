"""Creates the loaders of compiled grammars in the engine's process, per library."""

from __future__ import annotations

from sylvan.runtime.features.grammar.api import GrammarLoader
from sylvan.runtime.features.grammar.isolation.loader import IsolatedLoader
from sylvan.runtime.features.grammar.libraries import BOUNDED, make_library
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.wire import preparation


class Loaders:
    """Creates a library's loader on its first grammar. All methods are for one thread.

    Args:
        vocabulary: The model's vocabulary.
        limits: Limits of compiling one grammar.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self.vocabulary = vocabulary
        self._limits = limits
        self._made: dict[str, GrammarLoader] = {}

    def of(self, library: str) -> GrammarLoader:
        """Return the loader of `library`: in separate processes unless its calls are bounded.

        Raises:
            ConfigError: The library is not installed.
        """
        loader = self._made.get(library)
        if loader is None:
            loader = self._made[library] = self._make(library)
        return loader

    def close(self) -> None:
        """Stop the loaders' processes."""
        for loader in self._made.values():
            if isinstance(loader, IsolatedLoader):
                loader.close()

    def _make(self, library: str) -> GrammarLoader:
        if library in BOUNDED:
            return make_library(library, self.vocabulary, self._limits.max_states)
        return IsolatedLoader(preparation(library, self.vocabulary, self._limits))
