"""Patterns matched while text arrives find what Python's `re` finds in the text so far."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.text.patterns.compile import MAX_STATES, PatternError, compile_pattern
from sylvan.text.patterns.search import Automaton, PatternSearch

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "c",
        ".",
        "[ab]",
        "[^a]",
        r"\d",
        r"\w",
        r"\W",
        r"\s",
        r"\D",
        "\u00e9",
        "[a-c1]",
        "\n",
    ]
)
LOOKS = st.sampled_from(
    ["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?<=a)", "(?<!b)", r"(?<=\bb)", "(?<!^)"]
)
REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{2,}?", "{0,2}"])
FLAGS = st.sampled_from(["", "(?i)", "(?s)", "(?m)", "(?a)", "(?ims)"])
TEXT = st.text(alphabet=st.sampled_from("aabbAB1 c\n\u00e9\u00c9_"), max_size=16)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("(?:{})".format, inner)
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("{}{}".format, group, REPEATS),
        st.builds("({})".format, inner),
    )


PATTERNS = st.builds("{}{}".format, FLAGS, st.recursive(ATOMS | LOOKS, _larger, max_leaves=8))


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """The first match of a pattern that is not empty, wherever an empty one may stand."""
    spans = (m.span() for m in re.finditer(pattern, text))
    return next((span for span in spans if span[1] > span[0]), None)


@given(st.data(), PATTERNS, TEXT)
@settings(max_examples=300, deadline=None)
def test_what_is_found_is_what_re_finds(data: st.DataObject, pattern: str, text: str) -> None:
    search = PatternSearch(Automaton(compile_pattern(pattern)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))

    for start, end in pairwise([0, *cuts, len(text)]):
        found = search.push(text[start:end])
        wanted = first_match(pattern, text[:end])
        assert (found is None) == (wanted is None)
        if found is None:
            continue
        # where a preferred empty match ends the search of `re`, ours continues
        assert found[0] <= wanted[0]
        assert found == wanted or first_match(pattern, text[: found[1]]) is not None
        break


@given(PATTERNS, TEXT)
@settings(max_examples=300, deadline=None)
def test_what_may_still_match_is_pending(pattern: str, text: str) -> None:
    search = PatternSearch(Automaton(compile_pattern(pattern)))

    for char in text:
        pending = search.pending
        found = search.push(char)
        if found is None:
            continue
        assert found[1] - found[0] == 1 or (pending is not None and pending <= found[0])
        break


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    try:
        program = compile_pattern(text)
    except PatternError:
        return
    assert program.size <= MAX_STATES + 8
    re.compile(text)  # what `re` refuses is refused


EXPLOSIVE = [
    r"(?:a|a|aa)+$b",
    r"(a+)+b",
    r"(a|a)*b",
    r"(?s)(?<=b.*.*.*.*).c",
    r"(.*)*x",
    "(a?){60}a{60}b",
]


@pytest.mark.parametrize("pattern", EXPLOSIVE)
def test_memory_and_work_are_bounded_by_the_states(pattern: str) -> None:
    automaton = Automaton(compile_pattern(pattern))
    search = PatternSearch(automaton)

    for _ in range(40):
        assert search.push("a" * 100) is None
        assert len(search._threads.states) <= automaton.size
        assert automaton._words <= automaton._max_words


def test_what_is_remembered_is_forgotten_and_found_again() -> None:
    automaton = Automaton(compile_pattern(r"(?:[a-m][n-z]|[b-k][c-y]|.{3}[aeiou]){5}\d"))
    automaton._max_words = 200
    text = "thequickbrownfoxjumpsoverthelazydog" * 5 + "7"
    search = PatternSearch(automaton)

    found = None
    for char in text:
        found = found or search.push(char)

    assert found == first_match(r"(?:[a-m][n-z]|[b-k][c-y]|.{3}[aeiou]){5}\d", text)
