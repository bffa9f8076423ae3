"""Faults of weight files are reported before anything is loaded."""

from __future__ import annotations

import json

import pytest

from sylvan.checkpoints.headers import TensorHeader, read_header
from sylvan.config.checkpoint import model_facts
from sylvan.protocol.errors import ConfigError
from tests.support.random_model import write_random_model

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


def packed(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_entries_and_where_the_data_begins(tmp_path):
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [4, 28]}
    content = packed({"__metadata__": {"format": "pt"}, "w": entry})
    (tmp_path / "w.safetensors").write_bytes(content + b"\0" * 28)

    assert read_header(tmp_path / "w.safetensors") == (
        {"w": TensorHeader("F32", (2, 3), 4, 28)},
        len(content),
    )


BROKEN = {
    "empty": (b"", "is cut off: it ends after 0 bytes, in its header"),
    "a few bytes": (b"abc", "is cut off: it ends after 3 bytes, in its header"),
    "half a header": (packed({"w": {}})[:12], "is cut off: it ends after 12 bytes, in its header"),
    "pointer": (LFS, "is a pointer of Git LFS, not the weights; `git lfs pull` fetches them"),
    "noise": (b"\xff" * 64, "is not a safetensors file, or its header is malformed"),
    "a list": (packed([1]), "is not a safetensors file, or its header is malformed"),
    "no entry": (packed({"w": []}), "cannot read the entry of tensor 'w'"),
    "no shape": (packed({"w": {"dtype": "F32"}}), "cannot read the entry of tensor 'w'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_and_so_is_what_is_wrong(tmp_path, kind):
    content, words = BROKEN[kind]
    model = write_random_model(tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(content)

    with pytest.raises(ConfigError) as told:
        model_facts(str(model))

    assert str(told.value).startswith(f"'{file}'")
    assert words in str(told.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "model.safetensors").mkdir()

    with pytest.raises(ConfigError, match=r"cannot read '.*model\.safetensors': Is a directory"):
        read_header(tmp_path / "model.safetensors")
