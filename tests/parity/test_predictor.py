"""Predictions of whole texts for `sylvan eval`, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.predictor import Predictor
from tests.parity.checkpoints import VOCAB, make, write
from tests.parity.families import EXPERT
from tests.parity.rare import RECURRENT

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek-v3"])
def test_predictions_are_those_of_transformers(tmp_path, family):
    model = write(EXPERT[family](), 5, tmp_path) if family in EXPERT else make(family, tmp_path)
    ids = np.random.default_rng(3).integers(4, VOCAB, 70).tolist()  # several windows

    predictor = Predictor(tmp_path, "float32", len(ids))
    found = torch.cat(list(predictor.log_probs(ids, np.arange(len(ids), dtype=np.int32))))

    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


def test_recurrent_models_are_refused(tmp_path):
    write(RECURRENT["lfm2"](), 5, tmp_path)

    with pytest.raises(ConfigError, match="eval: Lfm2ForCausalLM is not a native decoder"):
        Predictor(tmp_path, "float32", 16)
