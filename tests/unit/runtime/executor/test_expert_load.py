"""How often each expert was visited is counted by layer, and can be asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.checkpoints import VOCAB, write
from tests.parity.families import FAMILIES
from tests.parity.serving import Serving


@pytest.mark.parametrize("runner", ["eager", "auto"])
def test_every_row_visits_its_experts_once(tmp_path, runner):
    write(FAMILIES["qwen2-moe"](), 3, tmp_path)  # experts in every second layer
    serving = Serving(tmp_path, runner=runner)
    prompt = np.random.default_rng(2).integers(4, VOCAB, 21).tolist()
    before = {name: load.sum().item() for name, load in serving.facts.expert_load.items()}

    serving.generate([prompt], max_new_tokens=5)

    loads = serving.facts.expert_load
    rows = len(prompt) + 4  # the last token is not run
    assert before == {"layers.1.mlp": 0}
    assert loads["layers.1.mlp"].shape == (8,)
    assert loads["layers.1.mlp"].sum().item() == 2 * rows


def test_dense_models_have_none(tmp_path):
    write(FAMILIES["gpt2"](), 3, tmp_path)

    assert not Serving(tmp_path).facts.expert_load
