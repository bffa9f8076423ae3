from __future__ import annotations

import re

import pytest

from sylvan.runtime.features.grammar.quoting import quotable


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ('^[^"]*$', '^[[^"]&&[^\\x01]]*$'),
        (r"[^\\]a[b-c]", r"[[^\\]&&[^\x01]]a[b-c]"),
        (r"[\x00-!]", r"[[\x00-!]&&[^\x01]]"),
        (r"[^\p{L}]", r"[[^\p{L}]&&[^\x01]]"),
    ],
)
def test_classes_without_what_json_escapes_lose_a_control_character(
    pattern: str, expected: str
) -> None:
    assert quotable(pattern) == expected


@pytest.mark.parametrize("pattern", [r"\[^\"]", "[^a]", r"[\s\S]", "[a-z]", r'[^\x00-\x1f"\\]'])
def test_other_classes_stay(pattern: str) -> None:
    assert quotable(pattern) == pattern
    assert re.compile(pattern)
