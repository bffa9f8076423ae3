"""LLaVA's own encoder gives the vectors of transformers, and is read only for an image."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.multimodal.llava_encoder import LlavaEncoder
from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder
from tests.support.multimodal import FAMILIES, write

NAME = "llava-siglip-qwen2"
CLOSE = 2e-5  # of float32, relative to the largest vector


def vectors(encoder, features):
    with torch.inference_mode():
        [found] = encoder.encode("image", features)
        return found.clone()


@pytest.mark.parametrize("layer", [-1, -2])
def test_vectors_equal_those_of_transformers(tmp_path, layer):
    write(NAME, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_feature_layer": layer}))
    assert LlavaEncoder.fits(tmp_path)
    features = FAMILIES[NAME].draw(np.random.default_rng(5))
    expected = vectors(TransformersEncoder(tmp_path, torch.float32), features)
    assert torch.equal(
        vectors(LlavaEncoder(tmp_path, torch.float32, native=False), features), expected
    )
    found = vectors(LlavaEncoder(tmp_path, torch.float32, native=True), features)
    assert (found - expected).abs().max() <= CLOSE * expected.abs().max()


def test_other_encoders_are_left_to_transformers(tmp_path):
    write(NAME, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in (
        {"vision_feature_select_strategy": "default"},
        {"vision_feature_layer": [-1, -2]},
        {"projector_hidden_act": "relu"},
        {"model_type": "llava_next"},
        {"vision_config": config["vision_config"] | {"model_type": "clip_vision_model"}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert not LlavaEncoder.fits(tmp_path)


def test_damage_is_found_before_there_is_an_image(tmp_path):
    write(NAME, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [patches] = [name for name in tensors if name.endswith("patch_embedding.weight")]
    for broken, words in (
        ({n: t for n, t in tensors.items() if n != patches}, "no patch_embedding.weight"),
        (tensors | {patches: tensors[patches][:, :, 1:].contiguous()}, "has shape"),
    ):
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=words):
            LlavaEncoder(tmp_path, torch.float32, native=True)


def test_pixels_of_another_size_are_an_error(tmp_path):
    write(NAME, tmp_path)
    encoder = LlavaEncoder(tmp_path, torch.float32, native=False)
    with pytest.raises(ValueError, match="pixel_values must be"):
        encoder.encode("image", {"pixel_values": np.zeros((1, 3, 14, 14), np.float32)})
    with pytest.raises(ValueError, match="no audio"):
        encoder.encode("audio", {})
