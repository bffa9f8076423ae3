"""Which grammar libraries are installed, and how one is made."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import version

from sylvan.runtime.features.grammar import backends
from sylvan.runtime.features.grammar.api import MAX_STATES, GrammarBackend, GrammarLibrary
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.utils import plugins

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "combined": ("llguidance", "xgrammar"),
    "llguidance": ("llguidance",),
    "outlines_core": ("outlines_core",),
    "xgrammar": ("xgrammar",),
}
"""What to install for each backend; `combined` is no library of its own."""

BOUNDED = frozenset({"llguidance", "outlines_core"})
"""Libraries of which every call is bounded in time and memory, so that the engine may make it."""


def installed_backends() -> tuple[str, ...]:
    """Backends all of whose libraries are here."""

    def complete(name: str) -> bool:
        needs = DISTRIBUTIONS.get(name, (name,))
        return all(importlib.util.find_spec(library) is not None for library in needs)

    return tuple(name for name in plugins.options(backends) if complete(name))


def library_version(backend: str) -> str:
    """Name and version of the library behind a backend, or of all of them."""
    return "-".join(f"{name}-{version(name)}" for name in DISTRIBUTIONS[backend])


def make_backend(name: str, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> GrammarBackend:
    """What compiles grammars, by name; imports its libraries.

    Args:
        name: Of a module in `backends`.
        vocabulary: The model's.
        max_states: Of the automaton of one grammar; see `GrammarBackend.grows_later`.

    Raises:
        ConfigError: the library is not installed.
    """
    kind = plugins.load(backends, name).BACKEND
    return kind(vocabulary, max_states) if kind.grows_later else kind(vocabulary)


def make_library(name: str, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> GrammarLibrary:
    """`name` is a `CompiledGrammar.library`."""
    kind = plugins.load(backends, name).BACKEND
    return kind(vocabulary, max_states) if kind.grows_later else kind(vocabulary)
