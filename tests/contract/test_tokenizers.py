"""Each kind of tokenizer file: the ids of its own library, exact bytes, exact streaming."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.checkpoints.vocab.build import CL100K, QWEN
from sylvan.checkpoints.vocab.tiktoken import KIMI
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.errors import ConfigError
from sylvan.text.detokenizer import DetokenizerOptions, IncrementalDetokenizer
from sylvan.text.tokenizer import Tokenizer
from tests.support import vocabularies
from tests.support.vocabularies import (
    Encode,
    folder,
    longest_first,
    tekken_file,
    tiktoken_file,
    world_file,
)

TEXTS = [
    "Hello world, how are you today?",
    "  two  spaces\n\nlines\ttab ",
    "def f(x): return x + 1234567",
    "\u00e4\u00f6\u00fc\u00df \u4f60\u597d \U0001f600 \U0001f469\u200d\U0001f680 \u0928\u092e",
    "it's I'M we'll HE'D",
    " lead",
    "x",
    "<0x41> \u2581 ~~~~ ||||",
]
TEXT = st.text(
    st.sampled_from("aehlorwd THE 0123<>'\n\t.\u00e4\u00df\u4f60\u597d\u0928\u092e\U0001f600"),
    max_size=40,
)


@dataclass(frozen=True)
class Kind:
    """A tokenizer as loaded here, and the library's own encoder; `exact`: texts come back."""

    tokenizer: Tokenizer
    encode: Encode
    exact: bool = True


def _pieces(path: Path, **changes: object) -> Kind:
    spm = pytest.importorskip("sentencepiece")
    data = vocabularies.train_pieces(**changes)
    library = spm.SentencePieceProcessor(model_proto=data)
    made = folder(path, {"tokenizer.model": data}, model_type="llama")
    exact = changes.get("normalization_rule_name", "identity") == "identity"
    return Kind(Tokenizer.load(made), library.encode, exact)


def _gguf_pieces(path: Path) -> Kind:
    pytest.importorskip("gguf")
    spm = pytest.importorskip("sentencepiece")
    from tests.support import gguf_files

    library = spm.SentencePieceProcessor(model_proto=vocabularies.train_pieces())
    ids = range(library.get_piece_size())
    types = [
        gguf_files.UNKNOWN
        if library.is_unknown(i)
        else gguf_files.CONTROL
        if library.is_control(i)
        else gguf_files.BYTE
        if library.is_byte(i)
        else gguf_files.NORMAL
        for i in ids
    ]
    gguf_files.write_tokenizer(
        path / "pieces.gguf",
        "llama",
        [library.id_to_piece(i) for i in ids],
        types,
        {
            "scores": [library.get_score(i) for i in ids],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        },
    )
    return Kind(Tokenizer.load(model_dir(str(path / "pieces.gguf"))), library.encode)


def _ranks(path: Path, name: str, pattern: str, model_type: str, control: list[str]) -> Kind:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = vocabularies.train_ranks(pattern)
    library = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    made = folder(path, {name: tiktoken_file(ranks)}, model_type=model_type)
    tokenizer = Tokenizer.load(made)
    assert [tokenizer.token_id(text) for text in control] == [
        len(ranks) + i for i in range(len(control))
    ]
    return Kind(tokenizer, library.encode_ordinary)


def _tekken(path: Path) -> Kind:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = vocabularies.train_ranks(CL100K)
    library = tiktoken.Encoding("t", pat_str=CL100K, mergeable_ranks=ranks, special_tokens={})
    made = folder(path, {"tekken.json": tekken_file(ranks, CL100K)}, model_type="mistral")
    return Kind(Tokenizer.load(made), lambda t: [i + 20 for i in library.encode_ordinary(t)])


def _gguf_pairs(path: Path, pre: str, pattern: str) -> Kind:
    pytest.importorskip("gguf")
    tiktoken = pytest.importorskip("tiktoken")
    from sylvan.checkpoints.vocab.build import spelled
    from sylvan.checkpoints.vocab.merges import merges_by_rank
    from tests.support import gguf_files

    ranks = vocabularies.train_ranks(pattern)
    library = tiktoken.Encoding(pre, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    names = [*map(spelled, ranks), "<|im_start|>", "<|im_end|>"]
    merges = [" ".join(pair) for pair in merges_by_rank(ranks, spelled)]
    gguf_files.write_tokenizer(
        path / "pairs.gguf",
        "gpt2",
        names,
        [gguf_files.NORMAL] * len(ranks) + [gguf_files.CONTROL] * 2,
        {
            "pre": pre,
            "merges": merges,
            "eos_token_id": len(ranks) + 1,
            "tokenizer.chat_template": "<|im_start|>{{ messages[0].content }}<|im_end|>",
        },
    )
    return Kind(Tokenizer.load(model_dir(str(path / "pairs.gguf"))), library.encode_ordinary)


def _world(path: Path) -> Kind:
    """Ranks of a byte-pair encoding as tokens, and some whose beginnings are no tokens."""
    ranks = vocabularies.train_ranks(CL100K, 340)
    more = [b"are you today?", "\u4f60\u597d".encode()[:5], b"))]|*", b"\\n'\"", b"  \n\n\t"]
    tokens = {token: number + 1 for number, token in enumerate([*ranks, *more])}
    made = folder(path, {"rwkv_vocab_v1.txt": world_file(tokens)}, model_type="rwkv6")
    return Kind(Tokenizer.load(made), lambda text: longest_first(tokens, text))


# As the models' own tokenizer.json have them.
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)

KINDS = {
    "sentencepiece bpe": _pieces,
    "sentencepiece bpe without prefix": lambda p: _pieces(p, add_dummy_prefix=False),
    "sentencepiece unigram": lambda p: _pieces(p, model_type="unigram", vocab_size=330),
    "sentencepiece normalising": lambda p: _pieces(
        p,
        model_type="unigram",
        vocab_size=330,
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True,
    ),
    "tiktoken qwen": lambda p: _ranks(
        p, "qwen.tiktoken", QWEN, "qwen", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    ),
    "tiktoken llama3": lambda p: _ranks(
        p, "tokenizer.model", CL100K, "llama", ["<|begin_of_text|>", "<|end_of_text|>"]
    ),
    "tiktoken glm4": lambda p: _ranks(p, "tokenizer.model", CL100K, "chatglm", ["<|endoftext|>"]),
    "tekken": _tekken,
    "rwkv world": _world,
    "gguf llama": _gguf_pieces,
    "gguf qwen2": lambda p: _gguf_pairs(p, "qwen2", QWEN),
    "gguf llama-bpe": lambda p: _gguf_pairs(p, "llama-bpe", CL100K),
    "gguf qwen35": lambda p: _gguf_pairs(p, "qwen35", QWEN_3_5),
    "gguf bailingmoe2": lambda p: _gguf_pairs(p, "bailingmoe2", LING),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory) -> Kind:
    path = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        return KINDS[request.param](path)


def test_ids_are_those_of_the_library(kind):
    for text in TEXTS:
        assert kind.tokenizer.encode(text, add_special_tokens=False) == kind.encode(text), text


@given(text=TEXT)
@settings(max_examples=80, deadline=None)
def test_ids_of_any_text_are_those_of_the_library(kind, text):
    assert kind.tokenizer.encode(text, add_special_tokens=False) == kind.encode(text)


@given(text=TEXT, data=st.data())
@settings(max_examples=80, deadline=None)
def test_streamed_text_is_the_text_of_all_bytes(kind, text, data):
    tok = kind.tokenizer
    ids = tok.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stream = IncrementalDetokenizer(tok, DetokenizerOptions())
    parts = [stream.push(ids[a:b]).text for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    parts.append(stream.push([], final=True).text)

    assert "".join(parts) == tok.decode(ids)
    if kind.exact:
        assert tok.decode(ids) == text
        whole = b"".join(map(tok.token_bytes, ids))
        assert whole[tok.strips_first_space and whole[:1] == b" " :] == text.encode()


def test_any_tokens_stream_as_they_decode(kind):
    tok = kind.tokenizer
    ids = [token for token in range(tok.vocab_size) if token not in tok.special_ids]
    stream = IncrementalDetokenizer(tok, DetokenizerOptions())
    parts = [stream.push([token]).text for token in ids]
    parts.append(stream.push([], final=True).text)

    assert "".join(parts) == tok.decode(ids)


def test_users_cannot_spell_control_tokens(kind):
    tok = kind.tokenizer
    control = {text: token for text, token in tok.protected.items() if text != "<unk>"}
    assert control

    for text in list(control)[:5]:
        forged = tok.encode_user(f"a {text} b", add_special_tokens=False)
        assert not set(forged) & set(control.values())
        assert control[text] in tok.encode(f"a {text} b", add_special_tokens=False)


def test_start_tokens_are_as_the_checkpoint_says(tmp_path):
    pytest.importorskip("sentencepiece")
    data = vocabularies.train_pieces()
    plain = folder(tmp_path / "a", {"tokenizer.model": data}, model_type="llama")
    said = json.dumps({"add_bos_token": False, "add_eos_token": True})
    other = folder(
        tmp_path / "b", {"tokenizer.model": data, "tokenizer_config.json": said}, model_type="llama"
    )

    assert Tokenizer.load(plain).encode("Hello")[0] == 1
    assert Tokenizer.load(other).encode("Hello")[-1] == 2
    assert Tokenizer.load(other).encode("Hello")[0] != 1


def test_chatglm_numbers_its_control_tokens_after_the_pieces(tmp_path):
    """As tokenization_chatglm.py of ChatGLM 2 and 3 does: five tokens, then four roles."""
    spm = pytest.importorskip("sentencepiece")
    data = vocabularies.train_pieces()
    size = spm.SentencePieceProcessor(model_proto=data).get_piece_size()
    said = json.dumps({"tokenizer_class": "ChatGLMTokenizer"})
    path = folder(
        tmp_path, {"tokenizer.model": data, "tokenizer_config.json": said}, model_type="chatglm"
    )
    tokenizer = Tokenizer.load(path)

    ids = tokenizer.encode("Hello")

    assert ids[:2] == [size + 1, size + 3]  # [gMASK] and sop
    assert ids[2:] == spm.SentencePieceProcessor(model_proto=data).encode("Hello")
    assert tokenizer.encode("<|user|>", add_special_tokens=False)[-1] == size + 6
    assert size + 3 not in tokenizer.encode_user("sophisticated")[2:]


def test_glm4_starts_texts_with_its_mask(tmp_path):
    ranks = {bytes([i]): i for i in range(256)}
    path = folder(tmp_path, {"tokenizer.model": tiktoken_file(ranks)}, model_type="chatglm")

    assert Tokenizer.load(path).encode("A") == [256 + 2, 256 + 4, 65]


def test_kimi_splits_as_tiktoken_does(tmp_path):
    ranks = {bytes([i]): i for i in range(256)} | {b"He": 256, b"ll": 257, b"Hell": 258}
    config = {"added_tokens_decoder": {"259": {"content": "[BOS]", "special": True}}}
    path = folder(
        tmp_path,
        {"tiktoken.model": tiktoken_file(ranks), "tokenizer_config.json": json.dumps(config)},
        model_type="kimi_k2",
    )
    tokenizer = Tokenizer.load(path)

    assert "\\p{Han}" in KIMI
    assert tokenizer.encode("Hello\u4f60[BOS]")[-1] == 259
    assert (
        tokenizer.decode(tokenizer.encode("Hello\u4f60\u597d, 12345")) == "Hello\u4f60\u597d, 12345"
    )


def test_chat_template_of_a_gguf_file_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = _gguf_pairs(tmp_path, "qwen2", QWEN).tokenizer

    assert "messages[0].content" in str(tokenizer.chat_template)
    assert tokenizer.eos_ids == (tokenizer.token_id("<|im_end|>"),)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "tokenizer.model",
            b"\x0a\xff\xff\xff\xff\x0f",
            "not a SentencePiece model, or is cut off",
        ),
        ("tokenizer.model", b"", "has no pieces"),
        ("qwen.tiktoken", b"YQ== 0\nnonsense\n", "line 2 is not a token"),
        ("other.tiktoken", b"YQ== 0\n", "model_type 'odd'"),
        ("tekken.json", b'{"vocab": []}', "not a tekken.json"),
        ("tekken.json", b"{", "tekken.json cannot be used"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, words):
    path = folder(tmp_path, {name: content}, model_type="odd")

    with pytest.raises(Exception, match=words) as error:
        Tokenizer.load(path)

    assert type(error.value).__name__ == "ConfigError"
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1 'a' 1\n2 'b' 2\n", "line 2 is not an id, a token and its length in bytes"),
        (b"1 'a' 1\nx\n", "line 2 is not"),
        (b"1 'a' 1\n", "the byte 0 has no token of its own"),
    ],
)
def test_broken_vocabularies_of_rwkv_are_named(content, reason, tmp_path):
    made = folder(tmp_path, {"rwkv_vocab_v1.txt": content}, model_type="rwkv7")

    with pytest.raises(ConfigError, match=f"rwkv_vocab_v1.txt cannot be used: {reason}"):
        Tokenizer.load(made)


def test_the_end_token_of_rwkv_is_the_one_that_the_checkpoint_names(tmp_path):
    tokens = {bytes([byte]): byte + 1 for byte in range(256)}
    files = {"vocab.txt": world_file(tokens), "tokenizer_config.json": '{"eos_token": "<s>"}'}

    tokenizer = Tokenizer.load(folder(tmp_path, files, model_type="rwkv7"))

    assert tokenizer.eos_ids == (0,)
    assert tokenizer.encode("a<s>") == [98, 0]
    assert tokenizer.encode_user("<s>") == [61, 116, 63]
