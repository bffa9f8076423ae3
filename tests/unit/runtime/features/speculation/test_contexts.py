"""A tree of contexts against its definition, and files that are none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.api import GRADES, share_grade
from sylvan.runtime.features.speculation.contexts import FILE, ContextTree, load_contexts
from sylvan.runtime.features.speculation.ngram import NgramDrafter
from sylvan.training.contexts import context_tree
from tests.support.kv import request

VOCAB = 12

texts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 8)),
    min_size=1,
    max_size=4,
)


def tree_of(said, longest=4, least=1):
    pairs = [(np.array(text, np.int32), min(first, len(text) - 1)) for text, first in said]
    return context_tree(pairs, VOCAB, longest, least)


def mostly(said, end, longest, least):
    """The token that mostly followed the longest known end of a text, the smallest of equals."""
    for length in range(min(longest, len(end)), -1, -1):
        context = end[len(end) - length :]
        after = Counter(
            text[i]
            for text, first in said
            for i in range(min(first, len(text) - 1), len(text))
            if i >= length and text[i - length : i] == context
        )
        if sum(after.values()) >= (least if length else 1):
            return max(after, key=lambda token: (after[token], -token))
    raise AssertionError("something was said")


@given(texts, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 5), st.integers(1, 3))
def test_it_drafts_what_mostly_followed_the_longest_known_context(said, end, longest, least):
    tree = ContextTree(tree_of(said, longest, least))

    token, share = tree.predict(end)
    assert token == mostly(said, end, longest, least)
    assert 0 < share < 1
    assert tree.depth <= longest


def test_contexts_that_draft_no_better_than_shorter_ones_are_left_out():
    same = [([5, 6, 7, 8] * 10, 0)]
    assert len(tree_of(same).parents) == 4, "the newest token is enough"
    differing = [([1, 5, 6] * 9, 0), ([2, 5, 7] * 9, 0)]
    arrays = tree_of(differing)

    assert ContextTree(arrays).predict([1, 5])[0] == 6
    assert ContextTree(arrays).predict([2, 5])[0] == 7


def test_nothing_said_makes_no_tree():
    with pytest.raises(ValueError, match="no answers"):
        context_tree([(np.array([1, 2], np.int32), 2)], VOCAB, 4, 1)


def test_what_is_written_is_read(tmp_path):
    arrays = tree_of([([1, 2, 3, 1, 2, 4], 1)])
    arrays.save(tmp_path)

    found = load_contexts(tmp_path, VOCAB)
    assert found.predict([3, 1, 2]) == ContextTree(arrays).predict([3, 1, 2])
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": VOCAB + 1}, "was made for 13 tokens, the model has 12"),
        ({"tokens": np.full(7, VOCAB, np.int32)}, "tokens must be ids in 0..11"),
        ({"predictions": np.full(8, -1, np.int32)}, "predictions must be ids in 0..11"),
        ({"predictions": np.zeros(3, np.int32)}, "predictions are int32[3], not 8 numbers"),
        ({"shares": np.zeros(8, np.float32)}, "shares are float32[8], not 8 numbers"),
        ({"parents": np.full(7, 7, np.int32)}, "parents must come before their children"),
        ({"parents": np.array(["a"] * 7)}, "parents are"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path, fields, words):
    arrays = tree_of([([1, 2, 3, 1, 2, 4, 2, 2, 5], 1)])
    assert len(arrays.parents) == 7
    replace(arrays, **fields).save(tmp_path)

    with pytest.raises(ConfigError) as refused:
        load_contexts(tmp_path, VOCAB)
    assert words in str(refused.value)
    assert str(tmp_path / FILE) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no archive", b"\x93NUMPY"])
def test_files_that_are_none_are_refused(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used"):
        load_contexts(tmp_path, VOCAB)
    with pytest.raises(ConfigError, match="cannot be used"):
        load_contexts(tmp_path / "nowhere", VOCAB)


def test_a_copy_is_drafted_as_long_as_the_tree_is_not_surer():
    tree = ContextTree(tree_of([([3, 9] * 20, 1), ([7, 1], 1), ([7, 2], 1)], longest=2))
    assert tree.predict([3])[0] == 9
    assert tree.predict([7])[1] < 0.5
    drafter = NgramDrafter(2, 8, contexts=tree)

    copied = drafter.propose(Req(request("r", [5, 6, 7, 4, 8, 8, 5, 6, 7])), 2)
    assert copied.tokens == (4, 8), "three tokens match; the tree knows little"
    assert copied.grades == (3, 4)
    surer = drafter.propose(Req(request("s", [3, 4, 6, 3])), 2)
    assert surer.tokens[0] == 9, "one token matches"
    assert surer.grades[0] == share_grade(tree.predict([3])[1]) > GRADES
