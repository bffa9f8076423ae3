"""How a tokenizer's vocabulary is described, and texts are written by it."""

from __future__ import annotations

import pytest

from sylvan.runtime.features.grammar.text import vocabulary_of
from sylvan.runtime.features.grammar.vocabulary import GreedyEncoder, Vocabulary
from sylvan.text.tokenizer import Tokenizer
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Vocabulary:
    return vocabulary_of(Tokenizer.load(write_model(tmp_path_factory.mktemp("m"))), 300)


def test_special_tokens_and_padding_are_no_text(words: Vocabulary) -> None:
    assert words.size == 300
    assert set(words.special) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert words.special["<|im_end|>"] in words.eos_ids
    assert set(range(263, 300)) | set(words.special.values()) == set(words.non_text_ids().tolist())


@pytest.mark.parametrize("text", ["", "plain", "<think> caf\u00e9", "a <|im_end|> b", "\n x"])
def test_a_text_is_written_in_tokens_that_spell_it(words: Vocabulary, text: str) -> None:
    for data in (text.encode(), text.encode()[:-1]):
        ids = words.encode(data)

        assert b"".join(words.tokens[i] for i in ids) == data
        assert not set(ids) & set(words.special.values())


def test_greedy_takes_the_longest_and_leaves_out_what_has_no_token() -> None:
    encode = GreedyEncoder([b"a", b"ab", b"abc", b"c", b""], frozenset({2}))

    assert encode(b"abc?a") == [1, 3, 0]
