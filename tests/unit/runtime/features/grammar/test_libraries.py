"""Which backends are said to be installed, and that what `auto` chooses of them can be made."""

from __future__ import annotations

import importlib.util

import pytest

from sylvan.config.check import check
from sylvan.config.resolve import resolve
from sylvan.config.tree import Config
from sylvan.runtime.features.grammar.libraries import installed_backends
from tests.support.config_facts import make_facts

LIBRARIES = ("llguidance", "outlines_core", "xgrammar")


@pytest.mark.parametrize(
    ("present", "found", "chosen"),
    [
        ((), (), "none"),
        (("llguidance",), ("llguidance",), "llguidance"),
        (("xgrammar",), ("xgrammar",), "xgrammar"),
        (("llguidance", "xgrammar"), ("combined", "llguidance", "xgrammar"), "combined"),
        (LIBRARIES, ("combined", *LIBRARIES), "combined"),
    ],
)
def test_what_auto_chooses_is_among_those_installed(monkeypatch, present, found, chosen):
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: object() if n in present else None)
    facts = make_facts(
        options=dict(make_facts().options) | {"grammar.backend": installed_backends()}
    )

    resolved = resolve(Config(), facts)

    assert facts.options["grammar.backend"] == found
    assert resolved.config.grammar.backend == chosen
    check(resolved, facts)
