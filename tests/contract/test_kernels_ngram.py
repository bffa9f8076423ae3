"""Where the newest tokens came before: each implementation against trying all places."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.kernels.native.library import LibraryMissing, usable
from sylvan.kernels.ngram import compiled, longest_match, reference

MATCHES = {"chosen": longest_match, "reference": reference.longest_match}
with contextlib.suppress(LibraryMissing):  # nothing is compiled
    MATCHES |= {name: compiled(name) for name, obstacle in usable().items() if not obstacle}
texts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=90),
    st.lists(st.integers(0, 30), min_size=1, max_size=90),
    st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda part: part * 12),
)


def tried(corpus, text, longest):
    best = (0, -1)
    for place in range(len(corpus)):
        most = min(longest, len(text), place + 1)
        count = 0
        while count < most and corpus[place - count] == text[len(text) - 1 - count]:
            count += 1
        if count:
            best = max(best, (count, place))
    return best[1], best[0]


@given(texts, texts, st.integers(1, 40))
def test_the_longest_match_is_found_and_of_equals_the_newest(corpus, text, longest):
    right = tried(corpus, text, longest)
    arrays = np.array(corpus, np.int32), np.array(text, np.int32)

    assert {name: match(*arrays, longest) for name, match in MATCHES.items()} == dict.fromkeys(
        MATCHES, right
    )


@given(texts, st.integers(1, 40))
def test_a_text_is_found_in_what_came_before_its_end(text, longest):
    right, ids = tried(text[:-1], text, longest), np.array(text, np.int32)

    assert {name: match(ids[:-1], ids, longest) for name, match in MATCHES.items()} == (
        dict.fromkeys(MATCHES, right)
    )


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
def test_nothing_is_found_in_nothing(match):
    some, none = np.array([1, 2], np.int32), np.empty(0, np.int32)
    assert match(none, some, 8) == match(some, none, 8) == (-1, 0)
