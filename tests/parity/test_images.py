"""Checkpoints that also see images answer texts as transformers does."""

from __future__ import annotations

from typing import Any

import transformers

from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import write
from tests.parity.compare import compare
from tests.parity.families import FAMILIES

VISION = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_llama4_with_images(tmp_path):
    config = transformers.Llama4Config(
        text_config=FAMILIES["llama4"]().to_dict(),
        vision_config=VISION,
        **ENDS,
    )
    model = write(config, 3, tmp_path, auto=transformers.AutoModelForImageTextToText)

    apart = compare(tmp_path, model, new=32)

    served = load_config(tmp_path)
    assert (served.architecture, served.path) == ("Llama4ForConditionalGeneration", "native")
    assert not apart.modes
    assert apart.excess <= 1
