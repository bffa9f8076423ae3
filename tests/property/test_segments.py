"""Ids of a text that is put together from segments are those of the text as a whole."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from sylvan.text.segments import SegmentedEncoder
from sylvan.text.tokenizer import Tokenizer
from tests.support.vocabularies import LINES

BEFORE, AFTER = "<s>", "</s>"
CONTROL = ["<|im_start|>", "<|im_end|>", "<|im|>", "<|im|>x", "<tool>"]
WORDS = [
    "Hello",
    "hello world",
    "x",
    "1234",
    "\u00e4\u00f6",
    "\u4f60\u597d",
    "\U0001f600",
    "e\u0301",
]
PIECES = st.sampled_from(
    [
        *CONTROL,
        *WORDS,
        BEFORE,
        AFTER,
        "<left>",
        "<right>",
        "<word>",
        "<soft>",
        "<|im_",
        "|>",
        " ",
        "  ",
        "\n",
    ]
)
TEXTS = st.lists(PIECES, max_size=24).map("".join)


def byte_level(prefix_space):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return backend, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)


def metaspace(scheme):
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return backend, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])


def unigram(scheme):
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    special = ["<unk>"]
    return backend, trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>"
    )


def legacy():
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return backend, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])


def word_piece():
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"])


KINDS = {
    "byte level": lambda: byte_level(False),
    "byte level, space": lambda: byte_level(True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "unigram first": lambda: unigram("first"),
    "unigram always": lambda: unigram("always"),
    "legacy": legacy,
    "word pieces": word_piece,
}
AROUND = {"none": None, "start": f"{BEFORE} $A", "both": f"{BEFORE} $A {AFTER}"}


@cache
def tokenizer(kind, around, folder):
    backend, trainer = KINDS[kind]()
    trainer.show_progress = False
    backend.train_from_iterator(LINES, trainer)
    exact = [AddedToken(text, special=True, normalized=False) for text in (BEFORE, AFTER, *CONTROL)]
    backend.add_special_tokens(exact)
    backend.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<word>", single_word=True, normalized=False),
            AddedToken("<soft>", normalized=True),
        ]
    )
    if AROUND[around]:
        named = [(text, backend.token_to_id(text)) for text in (BEFORE, AFTER)]
        backend.post_processor = processors.TemplateProcessing(
            single=AROUND[around], special_tokens=named
        )
    made = folder / f"{kind} {around}"
    made.mkdir()
    backend.save(str(made / "tokenizer.json"))
    config = {"bos_token": BEFORE, "eos_token": AFTER}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_give_the_ids_of_the_whole(kind, around, folder):
    whole = tokenizer(kind, around, folder)
    kept = SegmentedEncoder(whole, 1 << 20)
    small = SegmentedEncoder(whole, 2000)  # most of it is forgotten again

    @settings(max_examples=60, deadline=None)
    @given(TEXTS, st.booleans())
    def check(text, special):
        expected = whole.encode(text, add_special_tokens=special)
        for encoder in (kept, small):
            for _ in range(2):
                assert encoder.encode(text, add_special_tokens=special) == expected

    check()
    assert kept.hits
    assert small._num_bytes <= 2000


def test_a_conversation_that_continues_is_not_tokenised_again(folder):
    encoder = SegmentedEncoder(tokenizer("byte level", "none", folder), 1 << 20)
    first = "<|im_start|>user\nHello<|im_end|>\n"
    encoder.encode(first)
    assert encoder.hits == 0
    encoder.encode(first + "<|im_start|>assistant\n")
    assert encoder.hits == len(first)


def test_nothing_is_kept_where_that_is_not_wanted(folder):
    encoder = SegmentedEncoder(tokenizer("byte level", "none", folder), 0)
    for _ in range(2):
        encoder.encode("<|im_start|>user\n")
    assert encoder.hits == 0
