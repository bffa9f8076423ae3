"""Regexes that mean the same to every library, and those that do not."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.grammar.regexes import plain_regex
from sylvan.runtime.features.grammar.spec import NotSupportedError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.c", r"a[^\n]c"),
        (r"a\.c", r"a\.c"),
        ("[.]", "[.]"),
        ("^ab$", "ab"),
        (r"ab\$", r"ab\$"),
        (r"ab\\$", r"ab\\"),
        (r"[\d_a-f\]^-]{2,3}?|(?:x|y)+", r"[\d_a-f\]^-]{2,3}?|(?:x|y)+"),
        (r"(?<year>\d{4})-\u00e9\u{1F600}\x41\/", r"(?<year>\d{4})-\u00e9\u{1F600}\x41\/"),
        ("東[é-ü]*", "東[é-ü]*"),
        ("", ""),
    ],
)
def test_what_means_the_same_everywhere_is_kept(text, expected) -> None:
    assert plain_regex(text, "xgrammar") == expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (r"\Aab\Z", 1),
        (r"ab\z", 3),
        (r"\07", 1),
        (r"\R|\h|\K|\G", 1),
        ("a^b", 2),
        ("a$b", 2),
        ("(^a|b$)", 2),
        ("[[:alpha:]]", 1),
        ("x[a&&b]", 2),
        (r"[\p{L}]", 1),
        (r"\p{L}", 1),
        (r"\x{41}", 1),
        (r"a\b", 2),
        ("(?i)a", 1),
        ("(?=a)a", 1),
        (r"(a)\1", 4),
        ("a{,2}", 2),
        ("a\\", 2),
    ],
)
def test_what_does_not_is_refused_with_its_position(text, position) -> None:
    with pytest.raises(NotSupportedError) as caught:
        plain_regex(text, "xgrammar")

    assert str(caught.value).startswith(f"regex: at position {position}: ")
    assert str(caught.value).endswith("is not supported by grammar.backend xgrammar")
    assert caught.value.param == "regex"
