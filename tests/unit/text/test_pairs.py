"""Two texts as one sequence."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from sylvan.text.checkpoint import TokenizerFiles
from sylvan.text.pairs import PairEncoder
from sylvan.text.tokenizer import Tokenizer

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d"]
ENDS = [("[CLS]", 1), ("[SEP]", 2)]
BERT = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ENDS
)
ROBERTA = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ENDS
)


def make(processor):
    backend = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(WORDS[:4])
    if processor is not None:
        backend.post_processor = processor
    return backend, PairEncoder(Tokenizer(backend, TokenizerFiles(None)))


@pytest.mark.parametrize("processor", [BERT, ROBERTA, None])
def test_a_pair_is_joined_as_the_tokenizer_joins_it(processor):
    backend, pairs = make(processor)

    for first, second in (("a b", "c d"), ("a", "b c d"), ("", "c"), ("a", "")):
        expected = backend.encode(first, second)
        assert pairs.encode(first, second) == (expected.ids, expected.type_ids)


def test_texts_cannot_forge_the_border():
    _, pairs = make(BERT)

    ids, segments = pairs.encode("a [SEP] b", "c")

    assert ids.count(2) == 2
    assert segments == [0] * (len(ids) - 2) + [1, 1]


def test_some_tokenizers_put_nothing_between_two_texts():
    assert make(BERT)[1].separates()
    assert make(ROBERTA)[1].separates()
