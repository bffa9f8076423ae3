"""Sounds to features: as transformers makes them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from sylvan.media.container import sound_samples
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor
from sylvan.media.sounds import RAW, SAMPLES, Sounds
from tests.support.media_files import wav
from tests.support.multimodal import IMAGE
from tests.support.processors import HEARS, PROCESSORS, write_files


def item(data: bytes, **options) -> PrepareItem:
    return PrepareItem(id=1, kind="audio", data=data, max_pixels=1, options=options)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2-audio")
    write_files(PROCESSORS["qwen2-audio"], folder)
    return Processor(folder)


def test_features_equal_those_of_transformers(processor):
    data = wav(0.7, 44100, 2)
    made = processor.prepare(item(data))
    samples = sound_samples(data, 16000, 60)
    settings = {name: value for name, value in HEARS.items() if name != "feature_extractor_type"}
    extractor = transformers.WhisperFeatureExtractor(**settings)
    expected = extractor(
        samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np"
    )
    np.testing.assert_array_equal(made.features["input_features"], expected["input_features"])
    mask = made.features["feature_attention_mask"]
    np.testing.assert_array_equal(mask, expected["attention_mask"])
    frames = int(mask.sum())
    assert made.tokens == (IMAGE,) * (((frames - 1) // 2 + 1 - 2) // 2 + 1)
    assert made.placeholder == IMAGE


def test_samples_can_be_asked_for_and_given(processor):
    data = wav(0.7)
    found = processor.prepare(item(data, **{SAMPLES: True})).features
    assert int(found["rate"]) == 16000
    raw = processor.prepare(item(found["samples"].tobytes(), **{RAW: True}))
    assert raw.digest == processor.prepare(item(data)).digest


def test_a_sound_that_is_longer_than_a_model_hears_is_refused(processor):
    with pytest.raises(UnreadableError, match="hears 1 s"):
        processor.prepare(item(wav(1.2)))


def test_voxtral_hears_windows(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"audio_config": {"intermediate_size": 128, "hidden_size": 32,'
        ' "max_source_positions": 20}}'
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=16)
    sounds = Sounds(tmp_path, extractor, SimpleNamespace(audio_token="<a>"), "VoxtralProcessor", {})
    data = wav(1.0)
    features, text = sounds.prepare(item(data))
    theirs = VoxtralProcessor._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor),
        [sound_samples(data, 16000, 60)],
        40,
        sampling_rate=16000,
        padding=True,
        truncation=False,
        pad_to_multiple_of=40 * 160,
        return_tensors="pt",
    )
    np.testing.assert_array_equal(features["input_features"], theirs.numpy())
    assert text == "<a>" * (5 * len(theirs))
