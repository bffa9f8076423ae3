"""Words of transcriptions are split and timed as in transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from sylvan.text.word_times import Word, split_words, time_warp, timed_words, token_starts

PIECES = (
    *(" Hello", ",", " wor", "ld", "!", " \u00bf", "Qu", "e", "?", " (", "x", ")", " ", "\u4f60"),
    *("\u597d", ".", "...", " end"),
)
BYTES = [piece.encode() for piece in PIECES]
HALVES = "\u00e9".encode()  # of a character
BYTES += [HALVES[:1], HALVES[1:], b"\xff"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["random", "equal"])
def test_paths_equal_transformers(seed, kind):
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 40, 2)
    cost = rng.normal(size=(rows, columns)) if kind == "random" else np.ones((rows, columns))
    expected = _dynamic_time_warping(cost)
    found = time_warp(cost)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tolist() == theirs.tolist()


def decode(ids, **_):
    return b"".join(BYTES[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(("code", "language"), [("en", "english"), ("zh", "chinese")])
def test_words_equal_transformers(code, language):
    rng = np.random.default_rng(1)
    tokenizer = SimpleNamespace(decode=decode, eos_token_id=1000)
    for size in (1, 3, len(PIECES)):
        for _ in range(20):
            ids = rng.integers(0, len(PIECES), size).tolist()
            words, tokens, _ = _combine_tokens_into_words(tokenizer, ids, language)
            found = split_words(ids, BYTES.__getitem__, code)
            assert [word.text for word in found] == words
            assert [list(word.ids) for word in found] == tokens


def test_a_character_of_two_tokens_is_not_divided():
    first = len(PIECES)
    assert split_words([0, first, first + 1], BYTES.__getitem__, "en") == [
        Word(" Hello\u00e9", (0, first, first + 1))
    ]
    assert split_words([0, first + 2], BYTES.__getitem__, "zh")[-1].text == "\ufffd"


def test_words_have_the_times_of_their_tokens():
    weights = np.zeros((4, 40), np.float32)
    for row, start in enumerate((0, 10, 20, 30)):
        weights[row, start : start + 10] = 1
    starts = token_starts(weights)
    assert starts == pytest.approx([0, 0.2, 0.4, 0.6], abs=0.021)  # steps of 0.02 s
    found = timed_words([Word(" a", (1,)), Word(" bc", (2, 3))], starts, 0.5)
    assert [(word.start, word.end) for word in found] == [(0.0, starts[1]), (starts[1], 0.5)]
    assert timed_words([Word(" a", (1,) * 9)], starts, 9.0)[0].end == starts[-1]
