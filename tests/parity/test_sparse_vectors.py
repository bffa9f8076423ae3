"""SPLADE: a number for each word of the vocabulary equals that of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from sylvan.kernels import describe
from sylvan.protocol.errors import ConfigError
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.vectors import serve

ENCODER = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
KINDS = {
    "bert": lambda: transformers.BertConfig(**ENCODER),
    "roberta": lambda: transformers.RobertaConfig(**ENCODER),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=64, hidden_dim=112, n_layers=2, n_heads=4, initializer_range=0.15
    ),
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.MLMTransformer"},
    {
        "idx": 1,
        "name": "1",
        "path": "1_SpladePooling",
        "type": "sentence_transformers.sparse_encoder.models.SpladePooling",
    },
]


@pytest.fixture(params=sorted(KINDS))
def masked(request, tmp_path):
    """A checkpoint that fills masks, and the model that transformers made of it."""
    auto = transformers.AutoModelForMaskedLM
    return tmp_path, write(KINDS[request.param](), 5, tmp_path, auto=auto)


def _texts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(4, VOCAB, n).tolist() for n in (40, 3, 17)]


def test_vectors_equal_those_of_transformers(masked):
    path, model = masked

    found = serve(path, "splade").embed(_texts())

    for ids, mine in zip(_texts(), found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        expected = logits.relu().log1p().max(0).values.numpy()
        assert mine.shape == (VOCAB,)
        assert mine == pytest.approx(expected, abs=1e-4)
        assert 0 < np.count_nonzero(mine) < VOCAB


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_they_do_not_depend_on_the_batch(tmp_path):
    write(KINDS["bert"](), 5, tmp_path, auto=transformers.AutoModelForMaskedLM)

    together = serve(tmp_path, "splade").embed(_texts())
    alone = [serve(tmp_path, "splade").embed([ids])[0] for ids in _texts()]

    assert all(map(np.array_equal, together, alone))


def test_sentence_transformers_says_so(tmp_path):
    write(KINDS["bert"](), 5, tmp_path, auto=transformers.AutoModelForMaskedLM)
    wished = serve(tmp_path, "splade").embed(_texts()[:1])[0]
    (tmp_path / "1_SpladePooling").mkdir()
    settings = tmp_path / "1_SpladePooling" / "config.json"
    settings.write_text(json.dumps({"pooling_strategy": "max", "activation_function": "relu"}))
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))

    assert np.array_equal(serve(tmp_path).embed(_texts()[:1])[0], wished)

    settings.write_text(json.dumps({"pooling_strategy": "sum"}))
    with pytest.raises(ConfigError, match="pooling_strategy 'sum'"):
        serve(tmp_path)


def test_a_model_without_such_a_head_is_refused(tmp_path):
    write(KINDS["bert"](), 5, tmp_path, auto=transformers.AutoModel)

    with pytest.raises(ConfigError, match="needs a masked-LM head, which BertModel lacks"):
        serve(tmp_path, "splade")
