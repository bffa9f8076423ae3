"""The text part of a whole Gemma 3n checkpoint answers as transformers' causal model does."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.config.checkpoint import model_facts
from sylvan.config.media import MediaConfig
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.registry import load_config
from tests.parity.rare import GEMMA_SHARED
from tests.parity.serving import Serving
from tests.support.media_families import TEXT

NEW = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The checkpoint, with tensors of eyes and ears, and its text part in transformers."""
    folder = tmp_path_factory.mktemp("gemma3n")
    torch.manual_seed(3)
    text = transformers.Gemma3nTextConfig(
        **TEXT
        | GEMMA_SHARED
        | {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "altup_num_inputs": 3}
        | {"laurel_rank": 8, "intermediate_size": [96] * 4}
    )
    model = transformers.Gemma3nForCausalLM(text).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): x for name, x in load_file(path).items()
    }
    for name in ("vision_tower.timm_model.conv_stem.conv.weight", "embed_vision.embedding.weight"):
        tensors[f"model.{name}"] = torch.zeros(2, 2)
    tensors["model.audio_tower.conformer.0.norm.weight"] = torch.zeros(2)
    tensors["model.embed_audio.embedding.weight"] = torch.zeros(2, 2)
    save_file(tensors, path, {"format": "pt"})
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text.to_dict(),
        "vision_config": {"model_type": "gemma3n_vision"},
        "audio_config": {"model_type": "gemma3n_audio"},
        "image_token_id": 264,
        "audio_token_id": 265,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def test_texts_are_served_without_eyes_and_ears(whole):
    folder, model = whole
    config = load_config(folder)
    assert model_facts(str(folder)).vocab_size == config.vocab_size
    assert config.path == "transformers"
    assert config.media is not None
    assert not config.media.token_ids  # an image or a sound is refused: it takes text
    assert media_control(MediaConfig(), config) == ()
    serving = Serving(folder, workers=(media_worker,), runner="auto", chunk_tokens=6)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 250, length).tolist() for length in (3, 17, 9)]
    for number, ids in enumerate(prompts):
        serving.scheduler.add(
            GenerateRequest(
                rid=f"r{number}",
                input_ids=np.array(ids, np.int32),
                output_ids=np.empty(0, np.int32),
                sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW, sampling_seed=1),
            )
        )
    serving.run()
    for number, ids in enumerate(prompts):
        inputs = torch.tensor([ids])
        found = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
        assert serving.tokens[f"r{number}"] == found[0, len(ids) :].tolist()
    serving.close()
