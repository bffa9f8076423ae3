"""Models whose encoder reads the prompt answer as transformers does, in every mode."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sylvan.config.checkpoint import model_facts
from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.facts import check_tensors
from sylvan.runtime.features.multimodal.text_encoder import decoder_prompt
from sylvan.runtime.models.registry import load_config
from tests.parity.compare import compare
from tests.parity.reading import READING, START, ReadingServing, pair

QUICK = ("t5", "nllb")


@pytest.fixture(autouse=True)
def as_in_a_server(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in READING],
)
def test_it_equals_transformers(family, tmp_path):
    model = pair(family, tmp_path)
    config = load_config(tmp_path)
    assert config.path == "native"
    assert check_tensors(config, tmp_path)
    facts = model_facts(str(tmp_path))
    assert facts.tasks[0] == "generate"
    assert facts.context_len == config.max_position_embeddings

    new = 12 if family in QUICK else 32
    found = compare(tmp_path, model, new=new, serve=ReadingServing, start=(START,))

    if describe().variant is not None:
        assert found.runner.startswith("program (")
        assert found.runner.endswith(", PyTorch in CrossAttention")
    assert not found.modes
    assert found.excess <= 1


def test_the_text_decides_the_answer_and_is_encoded_once(tmp_path):
    pair("t5", tmp_path)
    serving = ReadingServing(tmp_path)

    answers = serving.generate([[START, first] for first in (5, 6, 5)], max_new_tokens=8)
    again = serving.generate([[START, 5]], max_new_tokens=8)

    assert answers[0] == answers[2] == again[0]
    assert answers[0] != answers[1]
    assert serving.control.counts.encoded == 2


@pytest.mark.parametrize("name", ["t5-gated"])
def test_a_head_of_its_own_is_used_and_not_scaled(name, tmp_path):
    """Flan-T5: transformers ties the two tables unless the file holds both."""
    model = pair(name, tmp_path)
    torch.manual_seed(1)
    head = torch.randn_like(model.inner.lm_head.weight) * 0.15
    model.inner.lm_head.weight = torch.nn.Parameter(head)
    model.inner.config.scale_decoder_outputs = False
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    found = compare(tmp_path, model, new=12, serve=ReadingServing, start=(START,))

    assert not found.modes
    assert found.excess <= 1


def test_a_decoder_starts_as_the_generation_config_says(tmp_path):
    pair("bart-pair", tmp_path)
    media = load_config(tmp_path).media
    assert media is not None
    config = tmp_path / "generation_config.json"

    config.write_text(json.dumps({"decoder_start_token_id": 2, "forced_bos_token_id": 0}))
    both = decoder_prompt(media, tmp_path)
    config.write_text("[]")

    assert both == (2, 0)
    assert decoder_prompt(media, tmp_path) == media.decoder_prompt == (START,)


def test_two_tables_are_refused(tmp_path):
    pair("marian-pair", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"share_encoder_decoder_embeddings": False})
    )

    with pytest.raises(ConfigError, match="share_encoder_decoder_embeddings"):
        load_config(tmp_path)
