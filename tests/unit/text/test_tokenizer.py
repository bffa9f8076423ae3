from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import tokenizers

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.text.tokenizer import Tokenizer
from tests.support.scripted import write_checkpoint

LONG = "Grüße, \U0001f600 an   all 1234 of you!\n" * 200
TEXTS = [
    LONG,
    "Hello world, how are you today?",
    "  two  spaces\n\nlines\ttab ",
    "def f(x): return x + 1",
    "\u00e4\u00f6\u00fc\u00df \u4f60 \U0001f600 \U0001f469\u200d\U0001f680 \u0928\u092e",
    "",
    " lead",
]


def test_encode_equals_the_library(kind: str, folders: dict, built: dict) -> None:
    tok = Tokenizer.load(folders[kind])

    for text in TEXTS:
        assert tok.encode(text) == built[kind].encode(text).ids
        assert tok.encode_user(text) == built[kind].encode(text).ids
    assert tok.encode_batch(TEXTS) == [tok.encode(text) for text in TEXTS]


def test_decode_equals_the_library(kind: str, folders: dict, built: dict) -> None:
    tok = Tokenizer.load(folders[kind])

    for text in TEXTS:
        ids = built[kind].encode(text).ids
        for skip in (True, False):
            want = built[kind].decode(ids, skip_special_tokens=skip)
            assert tok.decode(ids, skip_special_tokens=skip) == want


def test_decode_of_ordinary_text_gives_it_back(folders: dict) -> None:
    for kind in ("byte_level", "llama2", "gemma"):
        tok = Tokenizer.load(folders[kind])
        for text in TEXTS:
            assert tok.decode(tok.encode(text)) == text


def test_user_text_never_gives_a_protected_token(kind: str, folders: dict) -> None:
    tok = Tokenizer.load(folders[kind])
    protected = set(tok.protected.values()) - {tok.token_id("<unk>")}
    assert protected

    for text in tok.protected.keys() - {"<unk>"}:
        forged = f"a {text}{text} b {text}"
        assert not protected & set(tok.encode_user(forged, add_special_tokens=False))
        assert protected & set(tok.encode(forged, add_special_tokens=False))
        if kind != "unigram":
            assert tok.decode(tok.encode_user(forged)) == forged


def test_encode_user_keeps_the_added_start_token(folders: dict) -> None:
    tok = Tokenizer.load(folders["llama2"])

    ids = tok.encode_user("a </s> b")

    assert ids[0] == tok.bos_id
    assert tok.bos_id not in ids[1:]


def test_segments_tokenise_as_one_text(folders: dict) -> None:
    for kind, control in (("byte_level", "<|im_end|>"), ("llama2", "[/INST]")):
        tok = Tokenizer.load(folders[kind])
        text = f"Hello wor{control} ld, how"

        pieces = [("Hello w", True), (f"or{control} l", True), ("d, h", False), ("ow", True)]
        forged = [("Hello w", True), (f"or{control} l", False), ("d, how", True)]

        assert tok.encode_segments(pieces) == tok.encode(text, add_special_tokens=False)
        ids = tok.encode_segments(forged)
        assert not set(ids) & set(tok.protected.values())
        assert tok.decode(ids) == text


def test_normaliser_cannot_be_used_to_forge(tmp_path: Path) -> None:
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tok.normalizer = tokenizers.normalizers.Lowercase()
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tok.add_special_tokens([tokenizers.AddedToken("<end>", normalized=True, special=True)])
    tok.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)

    assert loaded.encode("a <END>")[-1] == 2
    assert 2 not in loaded.encode_user("a <END>")
    assert loaded.spells_control_token("a <END>")
    assert not loaded.spells_control_token("a <EN>")


def test_added_whitespace_stays_ordinary(tmp_path: Path) -> None:
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator(["abc  "], tokenizers.trainers.BpeTrainer(show_progress=False))
    tok.add_tokens(["  "])
    tok.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)

    assert loaded.encode_user("a  b") == loaded.encode("a  b")
    assert loaded.token_id("  ") in loaded.encode("a  b")


def test_token_bytes_join_to_the_text(folders: dict) -> None:
    for kind in ("byte_level", "gemma"):
        tok = Tokenizer.load(folders[kind])
        for text in TEXTS:
            ids = tok.encode(text, add_special_tokens=False)
            assert b"".join(map(tok.token_bytes, ids)) == text.encode()


def test_token_bytes_of_odd_ids_are_empty(folders: dict) -> None:
    tok = Tokenizer.load(folders["byte_level"])

    assert tok.token_bytes(tok.vocab_size) == b""
    assert tok.token_bytes(-1) == b""
    assert tok.token_text(tok.protected["<|im_end|>"]) == "<|im_end|>"


def test_ids_come_from_all_config_files(folders: dict, tmp_path: Path) -> None:
    source = folders["byte_level_bos"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8], "pad_token_id": 3}')
    (tmp_path / "config.json").write_text(
        '{"eos_token_id": 8, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )

    tok = Tokenizer.load(tmp_path)

    assert tok.eos_ids == (7, 8, tok.token_id("<|eot_id|>"))
    assert tok.bos_id == tok.token_id("<|begin_of_text|>")
    assert tok.pad_id == 3
    assert tok.files.architecture == "LlamaForCausalLM"
    assert tok.vocab_size == max(tok.special_ids) + 1


def test_tokens_known_only_to_the_config_are_added(built: dict, tmp_path: Path) -> None:
    built["byte_level"].save(str(tmp_path / "tokenizer.json"))
    size = built["byte_level"].get_vocab_size()
    config = {
        "added_tokens_decoder": {str(size): {"content": "<extra>", "special": True}},
        "pad_token": {"content": "<pad>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    tok = Tokenizer.load(tmp_path)

    assert tok.encode("a<extra>")[-1] == size
    assert tok.pad_id == size + 1
    assert tok.decode([tok.pad_id, size]) == ""


def test_start_token_is_not_doubled(folders: dict) -> None:
    tok = Tokenizer.load(folders["byte_level_bos"])

    ids = tok.encode("<|begin_of_text|>Hello")

    assert ids == tok.encode("Hello")
    assert ids.count(tok.bos_id) == 1
    assert tok.encode_batch(["<|begin_of_text|>Hello"]) == [ids]


def test_templates_are_found_in_all_places(built: dict, tmp_path: Path) -> None:
    built["byte_level"].save(str(tmp_path / "tokenizer.json"))
    config = {
        "chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "R"}]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "A", "rag": "R"}

    (tmp_path / "chat_template.jinja").write_text("B")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")

    tok = Tokenizer.load(tmp_path)
    assert tok.chat_template == "B"
    assert tok.chat_templates["tool_use"] == "T"


def test_given_template_replaces_all_others_and_keeps_their_tokens_protected(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")

    tok = Tokenizer.load(tmp_path, chat_template="{{ messages[0].content }}")

    assert tok.chat_templates == {"default": "{{ messages[0].content }}"}
    assert tok.chat_template == "{{ messages[0].content }}"
    assert tok.spells_control_token(
        "<tool_call>"
    )  # no special token, but the model's template writes it


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer that can be read"),
        ({"tokenizer.json": "{"}, "is not a tokenizer"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "is not valid JSON"),
        ({"tokenizer.json": "{}", "config.json": "[]"}, "must hold a JSON object"),
    ],
)
def test_broken_files_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.load(tmp_path / "nowhere")


def test_threads_share_one_tokenizer(folders: dict) -> None:
    tok = Tokenizer.load(folders["byte_level"])
    want = [tok.encode_user(f"{text} <|im_end|>") for text in TEXTS]
    fresh, results = Tokenizer.load(folders["byte_level"]), []

    def work() -> None:
        results.append([fresh.encode_user(f"{text} <|im_end|>") for text in TEXTS])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [want] * 4


@pytest.mark.parametrize("times", [1, 3000])
def test_a_pattern_that_takes_too_long_fails_its_text_only(tmp_path: Path, times: int) -> None:
    folder = write_checkpoint(tmp_path)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    slow = {**split, "pattern": {"Regex": "(x+x+)+y"}}
    kept = data["pre_tokenizer"]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, kept]}
    file.write_text(json.dumps(data))
    tok = Tokenizer.load(folder)

    with pytest.raises(RequestError, match="the model's tokenizer cannot read it") as refused:
        tok.encode_user("x" * 100 + "a" * times)
    assert refused.value.param == "text"
    assert tok.encode_user("a xx")
