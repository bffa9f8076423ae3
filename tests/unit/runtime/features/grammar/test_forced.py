"""Forced text as tokens: the tokenizer's own, as far as they are unambiguous."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.grammar.forced import Jumper
from sylvan.runtime.features.grammar.spec import GrammarSpec
from tests.support.grammar import TOKENS, make_backend, vocabulary

BACKEND = make_backend("llguidance")
JUMPER = Jumper(vocabulary())


def jump(regex: str) -> list[bytes]:
    matcher = BACKEND.compile(GrammarSpec("regex", regex)).matcher()
    fresh = BACKEND.compile(GrammarSpec("regex", regex)).matcher()

    ids = JUMPER.advance(matcher)

    assert all(fresh.accept(token) for token in ids)
    assert fresh.forced() == matcher.forced()
    assert fresh.is_terminated() == matcher.is_terminated()
    return [TOKENS[i] for i in ids]


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        ("a|b", []),
        ("xk(a|b)", [b"x", b"k"]),
        ("xy(a|b)", [b"x"]),  # some token continues "y"
        ("xyes", [b"x", b"yes"]),  # the end: nothing can join it
        ('x"name"', [b"x", b'"name"']),
        ("xye(s|z)", [b"x"]),  # "yes" may come
        ('x"(name|z)', [b"x"]),
        ('x"name(": |z)', [b"x"]),
        ("ax{3}(b|c)", [b"a", b"x", b"x", b"x"]),
        ("caf\u00e9(b|c)", [b"c", b"a", b"f", b"\xc3\xa9"]),
        ("caf(\u00e9|\u00e8)", [b"c", b"a", b"f"]),
    ],
)
def test_tokens_are_taken_up_to_where_a_longer_one_may_begin(regex, expected) -> None:
    assert jump(regex) == expected
