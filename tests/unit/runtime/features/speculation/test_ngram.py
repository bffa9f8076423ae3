"""Drafts after the longest match of the newest tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.kernels.ngram import longest_match
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.ngram import NgramDrafter, continuation
from tests.support.kv import request

texts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda part: part * 7),
)


@given(texts, st.integers(1, 20), st.integers(0, 30))
def test_what_came_then_is_repeated_where_it_runs_out(text, longest, count):
    ids = np.array(text, np.int32)
    end, matched = longest_match(ids[:-1], ids, longest)
    if not matched:
        return
    drafted = continuation(ids, end, count)

    whole = [*text, *drafted]
    assert len(drafted) == count
    assert all(whole[len(text) + i] == whole[end + 1 + i] for i in range(count))


@pytest.mark.parametrize(("shortest", "drafted"), [(1, (8, 9)), (2, (8, 9)), (3, ())])
def test_short_matches_are_not_worth_a_draft(shortest, drafted):
    req = Req(request("r", [6, 7, 8, 9, 5, 6, 7]))
    found = NgramDrafter(shortest, 16).propose(req, 2)

    assert found.tokens == drafted
    assert found.grade == (2 if drafted else 0)
