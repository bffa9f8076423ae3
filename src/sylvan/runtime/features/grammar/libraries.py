"""Which grammar libraries are installed, and how to create them."""

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
"""Packages of each backend; `combined` is not a library of its own."""

BOUNDED = frozenset({"llguidance", "outlines_core"})
"""Libraries whose calls are bounded in time and memory, so that the engine may make them itself."""


def installed_backends() -> tuple[str, ...]:
    """Return the backends whose libraries are all installed."""

    def complete(name: str) -> bool:
        needs = DISTRIBUTIONS.get(name, (name,))
        return all(importlib.util.find_spec(library) is not None for library in needs)

    return tuple(name for name in plugins.options(backends) if complete(name))


def library_version(backend: str) -> str:
    """Return name and version of the backend's library, or of all its libraries."""
    return "-".join(f"{name}-{version(name)}" for name in DISTRIBUTIONS[backend])


def make_backend(name: str, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> GrammarBackend:
    """Create a grammar compiler by name; imports its libraries.

    Args:
        name: Name of a module in `backends`.
        vocabulary: The model's vocabulary.
        max_states: Limit of one grammar's automaton; see `GrammarBackend.grows_later`.

    Raises:
        ConfigError: The library is not installed.
    """
    kind = plugins.load(backends, name).BACKEND
    return kind(vocabulary, max_states) if kind.grows_later else kind(vocabulary)


def make_library(name: str, vocabulary: Vocabulary, max_states: int = MAX_STATES) -> GrammarLibrary:
    """Create the library named in `CompiledGrammar.library`."""
    kind = plugins.load(backends, name).BACKEND
    return kind(vocabulary, max_states) if kind.grows_later else kind(vocabulary)
