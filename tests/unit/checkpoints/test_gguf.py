"""Headers of GGUF files, whole and broken, and the directories that stand for them."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from sylvan.checkpoints.gguf.config import config_json
from sylvan.checkpoints.gguf.header import read_header, read_model
from sylvan.checkpoints.gguf.quants import library
from sylvan.cli.main import main
from sylvan.config.checkpoint import model_dir, model_facts
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.files import open_weights
from sylvan.text.tokenizer import Tokenizer

pytest.importorskip("gguf")

import gguf

from tests.support import gguf_files

TOKENS = ["<unk>", "<s>", "</s>", *"\u2581abcdefgh"]
TYPES = [gguf_files.UNKNOWN, gguf_files.CONTROL, gguf_files.CONTROL] + [gguf_files.NORMAL] * 9
SCORES = {"scores": [-float(i) for i in range(12)], "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(tmp_path) -> Path:
    """A file with a vocabulary and one matrix."""
    folder = tmp_path / "model"
    folder.mkdir()
    return gguf_files.write_tokenizer(folder / "m.gguf", "llama", TOKENS, TYPES, SCORES)


def test_the_header_is_what_the_library_reads(small):
    found, library_reads = read_header(small), gguf.GGUFReader(small)

    for key, value in found.metadata.items():
        assert value == library_reads.get_field(key).contents()
    (tensor,) = library_reads.tensors
    ours = found.tensors["token_embd.weight"]
    assert (ours.start, ours.stop) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)
    assert ours.shape == (12, 32)


def test_every_cut_is_one_sentence(small, tmp_path):
    whole = small.read_bytes()
    for size in [*range(0, 400, 7), *range(400, len(whole), 97)]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf") as error:
            read_header(cut)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("at", "content", "words"),
    [
        (0, b"ABCD", "is not a GGUF file"),
        (4, struct.pack("<I", 9), "GGUF version 9"),
        (8, struct.pack("<Q", 1 << 60), "cut off"),
        (16, struct.pack("<Q", 1 << 60), "cut off"),
        (24, struct.pack("<Q", 1 << 62), "cut off"),
    ],
)
def test_impossible_headers_are_refused(small, at, content, words):
    data = bytearray(small.read_bytes())
    data[at : at + len(content)] = content
    small.write_bytes(data)

    with pytest.raises(ConfigError, match=words):
        model_dir(str(small))


def test_a_kind_of_numbers_that_is_not_read_is_named(small):
    data = small.read_bytes()
    place = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    for number, name in ((15, "Q8_K"), (9999, "unknown type, number 9999")):
        small.write_bytes(data[:place] + struct.pack("<I", number) + data[place + 4 :])
        with pytest.raises(ConfigError, match=name) as error:
            model_dir(str(small))
        assert "token_embd.weight" in str(error.value)


def _file(path: Path, family: str, **values: object) -> Path:
    out = gguf.GGUFWriter(str(path), family)
    for key, value in values.items():
        name = key.replace("__", ".")
        if isinstance(value, str):
            out.add_string(name, value)
        else:
            out.add_uint32(name, value)
    out.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    gguf_files.write(out)
    return path


SIZES = {
    "llama__context_length": 64,
    "llama__embedding_length": 32,
    "llama__block_count": 1,
    "llama__feed_forward_length": 64,
    "llama__attention__head_count": 2,
}


YARN = SIZES | {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4}


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("bloom", {}, "architecture 'bloom'; from GGUF files llama, qwen2, qwen3"),
        ("llama", {}, r"llama\.attention\.head_count must be one number, there is none"),
        ("llama", SIZES | {"llama__block_count": "two"}, "must be one number, it is two"),
        ("qwen3", {"qwen3__expert_count": 8}, "mixture of experts, which is not .* 'qwen3'"),
        ("llama", SIZES | {"llama__rope__dimension_count": 4}, "rope.dimension_count is 4"),
        ("llama", SIZES | {"llama__rope__scaling__type": "odd"}, "'odd' is not known"),
        ("llama", SIZES | {"llama__rope__scaling__alpha": 3}, "scaling.alpha is 3, but only 0.0"),
        ("llama", YARN | {"llama__rope__scaling__yarn_log_multiplier": 1}, "log_multiplier is 1"),
        ("llama", YARN | {"llama__rope__scaling__yarn_ext_factor": 0}, "ext_factor is 0, but only"),
    ],
)
def test_models_that_cannot_be_served_are_named(tmp_path, family, values, words):
    file = _file(tmp_path / "m.gguf", family, **values)

    with pytest.raises(ConfigError, match=words) as error:
        config_json(read_header(file))
    assert str(file) in str(error.value)


def split(folder: Path, count: int = 2) -> list[Path]:
    """A model whose tensors lie in two files, written by gguf itself."""
    out = gguf.GGUFWriter(
        str(folder / "m.gguf"), "llama", split_max_tensors=1, small_first_shard=False
    )
    for key, value in SIZES.items():
        out.add_uint32(key.replace("__", "."), value)
    for number in range(count):
        name = "token_embd.weight" if number == 0 else f"blk.0.attn_{'qkv'[number - 1]}.weight"
        out.add_tensor(name, np.full((4, 32), number, np.float32))
    gguf_files.write(out)
    return sorted(folder.glob("m-*.gguf"))


def test_a_model_in_several_files_is_one_model(tmp_path, cache):
    first, second = split(tmp_path)

    header = read_model(first)

    assert header.metadata["split.count"] == 2
    files = {name: tensor.file for name, tensor in header.tensors.items()}
    assert files == {"token_embd.weight": first, "blk.0.attn_q.weight": second}
    folder = model_dir(str(tmp_path))
    assert folder == model_dir(str(first)) == model_dir(str(second))
    weights = open_weights(folder)
    assert weights.tensor("model.layers.0.self_attn.q_proj.weight").mean() == 1
    assert weights.tensors["model.embed_tokens.weight"].file == first
    second.unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00002\.gguf' is missing"):
        model_dir(str(first))


def test_parts_of_another_model_are_refused(tmp_path):
    first, second = split(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=r"00002\.gguf' has the tensor 'token_embd.weight', as"):
        read_model(first)
    other = first.rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"should be called NAME-00001-of-00002\.gguf"):
        read_model(other)


def test_a_directory_stands_for_the_file_until_that_changes(small, cache):
    first = model_dir(str(small))

    assert first == model_dir(str(small.parent)) == model_dir(str(small))
    assert first.is_relative_to(cache)
    config = json.loads((first / "config.json").read_text())
    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], 12)
    assert model_facts(str(small)).weights == "gguf"
    small.write_bytes(small.read_bytes() + b"\0")
    assert model_dir(str(small)) != first
    with pytest.raises(ConfigError, match="has changed"):
        model_facts(str(first))


def test_several_files_are_ambiguous(small):
    (small.parent / "n.gguf").write_bytes(small.read_bytes())

    with pytest.raises(ConfigError, match=r"several GGUF files \(m.gguf, n.gguf\); name one"):
        model_dir(str(small.parent))


def test_the_package_is_named_where_it_is_missing(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"pip install 'sylvan\[gguf\]'"):
            model_dir(str(small))
    finally:
        library.cache_clear()


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("bert", {}, "tokenizer of kind 'bert'"),
        ("gpt2", {"pre": "afmoe"}, "splits words as 'afmoe'"),
        ("llama", {}, "0 scores of 12 tokens"),
    ],
)
def test_unknown_tokenizers_are_reported_when_one_is_needed(tmp_path, kind, values, words):
    file = gguf_files.write_tokenizer(tmp_path / "m.gguf", kind, TOKENS, TYPES, values)

    with pytest.raises(ConfigError, match=words):
        Tokenizer.load(model_dir(str(file)))


def test_check_tells_of_a_gguf_file(small, capsys):
    main(["check", "model", str(small), "--json", "--device", "cpu"])

    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["directory"]["detail"].startswith(str(small))
    assert found["weights"]["detail"] == "GGUF: F32 1.5 KiB; computed with in float32"
    assert found["tokenizer"]["detail"] == "from the GGUF file"
    assert found["vocabulary"]["detail"] == "12 token IDs, 12 embedding rows"
    assert found["chat template"]["status"] == "slow"
    assert "path native" in found["architecture"]["detail"]
