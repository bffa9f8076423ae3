"""Checkpoints that also see images answer texts as transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import write
from tests.parity.compare import compare
from tests.parity.families import FAMILIES
from tests.parity.rare import RECURRENT

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


def test_llama4_with_images(tmp_path, monkeypatch):
    # transformers 5.24 asks its text model for them, which has none
    outputs = transformers.modeling_outputs.MoeCausalLMOutputWithPast
    monkeypatch.setattr(outputs, "image_outputs", None, raising=False)
    config = transformers.Llama4Config(
        text_config=FAMILIES["llama4"]().to_dict(),
        vision_config=VISION,
        **ENDS,
    )
    model = write(config, 3, tmp_path, auto=transformers.AutoModelForImageTextToText)

    apart = compare(tmp_path, model, new=32)

    served = load_config(tmp_path)
    assert served.media is not None
    assert (served.architecture, served.path) == ("Llama4ForCausalLM", "native")
    assert not apart.modes
    assert apart.excess <= 1


QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
# as published: https://huggingface.co/Qwen/Qwen3.5-27B/blob/main/config.json
QWEN_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "rope_type": "default",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3.5", transformers.Qwen3_5Config), ("qwen3.5-moe", transformers.Qwen3_5MoeConfig)],
)
def test_qwen35_with_images(tmp_path, name, kind):
    text = RECURRENT[name]().to_dict() | {"rope_parameters": QWEN_ROPE}
    config = kind(text_config=text, vision_config=QWEN_VISION, **ENDS)
    model = write(config, 3, tmp_path, auto=transformers.AutoModelForImageTextToText)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2, 2)}, file, {"format": "pt"})

    apart = compare(tmp_path, model, new=32)

    served = load_config(tmp_path)
    text_model = config.architectures[0].replace("ForConditionalGeneration", "ForCausalLM")
    assert (served.architecture, served.path) == (text_model, "native")
    assert not apart.modes
    assert apart.excess <= 1
