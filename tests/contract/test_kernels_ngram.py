"""Where the newest tokens came before: each implementation against trying all places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.kernels.native.library import usable
from sylvan.kernels.ngram import compiled, longest_match, reference

VARIANTS = [name for name, obstacle in usable().items() if not obstacle]
MATCHES = {"chosen": longest_match, "reference": reference.longest_match} | {
    name: compiled(name) for name in VARIANTS
}
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


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
@given(texts, texts, st.integers(1, 40))
def test_the_longest_match_is_found_and_of_equals_the_newest(match, corpus, text, longest):
    found = match(np.array(corpus, np.int32), np.array(text, np.int32), longest)
    assert found == tried(corpus, text, longest)


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
@given(texts, st.integers(1, 40))
def test_a_text_is_found_in_what_came_before_its_end(match, text, longest):
    ids = np.array(text, np.int32)
    assert match(ids[:-1], ids, longest) == tried(text[:-1], text, longest)


@pytest.mark.parametrize("match", MATCHES.values(), ids=MATCHES)
def test_nothing_is_found_in_nothing(match):
    some, none = np.array([1, 2], np.int32), np.empty(0, np.int32)
    assert match(none, some, 8) == match(some, none, 8) == (-1, 0)
