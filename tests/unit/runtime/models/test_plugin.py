"""A family from another package: one file, and one line that names it."""

from __future__ import annotations

import json

import pytest
import transformers

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.registry import choose_path, load_config
from tests.parity.checkpoints import SHAPE, write
from tests.parity.serving import Serving

FAMILY = '''
"""Llama whose embeddings are doubled."""

from sylvan.runtime.models.config import common_fields, make_config
from sylvan.runtime.models.decoder import Decoder


def parse(raw):
    return make_config(common_fields(raw) | {"embed_scale": 2.0})


MODEL = Decoder
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A package with one file, installed in a temporary directory; returns a checkpoint of it."""
    (tmp_path / "toy_family.py").write_text(FAMILY)
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sylvan.models]\nToyForCausalLM = toy_family\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    write(transformers.LlamaConfig(**SHAPE), 1, model_dir)
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(raw | {"architectures": ["ToyForCausalLM"]}))
    return model_dir


def test_family_of_another_package_is_served(toy):
    config = load_config(toy)
    serving = Serving(toy)

    (tokens,) = serving.generate([[5, 6, 7]], max_new_tokens=4)

    assert (config.path, config.embed_scale) == ("native", 2.0)
    assert len(tokens) == 4


def test_without_the_package_the_family_is_unknown():
    with pytest.raises(ConfigError, match="ToyForCausalLM"):
        choose_path(SHAPE | {"architectures": ["ToyForCausalLM"]})
