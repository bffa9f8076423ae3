"""Which grammar libraries are installed; imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import version

from sylvan.runtime.features.grammar import backends
from sylvan.utils import plugins

DISTRIBUTIONS: Mapping[str, str] = {
    "llguidance": "llguidance",
    "outlines_core": "outlines_core",
    "xgrammar": "xgrammar",
}
"""What to install for each backend."""


def installed_backends() -> tuple[str, ...]:
    """Backends whose library is here."""
    return tuple(n for n in plugins.options(backends) if importlib.util.find_spec(n) is not None)


def library_version(backend: str) -> str:
    """Name and version of the library behind a backend."""
    return f"{backend}-{version(DISTRIBUTIONS[backend])}"
