"""Whisper writes what transformers writes, whatever is batched, cut, cached or lost."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from sylvan.config.media import MediaConfig
from sylvan.media.processor import digest_of
from sylvan.protocol.media import MediaItem
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.registry import load_config
from sylvan.text.word_times import token_starts
from tests.parity.serving import Serving

START, NEW = 263, 10
PROMPTS = ((START, 7, 9), (START, 7, 9, 11, 12, 13, 14, 15), (20, 21, START, 7, 9), (START, 7))


class Ears:
    """A tiny checkpoint, and sounds drawn at random."""

    def __init__(self, folder) -> None:
        torch.manual_seed(5)
        config = transformers.WhisperConfig(
            vocab_size=300,
            d_model=64,
            decoder_ffn_dim=96,
            encoder_ffn_dim=96,
            decoder_layers=3,
            encoder_layers=2,
            decoder_attention_heads=4,
            encoder_attention_heads=4,
            num_mel_bins=16,
            max_source_positions=30,
            max_target_positions=64,
            decoder_start_token_id=START,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
        self.model = transformers.WhisperForConditionalGeneration(config).eval().float()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.12)
        self.model.save_pretrained(folder)
        self.folder, self.config = folder, load_config(folder)
        rng = np.random.default_rng(3)
        sounds = [rng.normal(size=(1, 16, 60)).astype(np.float32) for _ in range(3)]
        self.sounds = [sounds[0], sounds[1], sounds[2], sounds[0]]

    def expected(self) -> list[list[int]]:
        found = []
        for sound, prompt in zip(self.sounds, PROMPTS, strict=True):
            ids = list(prompt)
            for _ in range(NEW):
                with torch.inference_mode():
                    logits = self.model(
                        input_features=torch.from_numpy(sound),
                        decoder_input_ids=torch.tensor([ids]),
                    ).logits
                ids.append(int(logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
        return found

    def serving(self, **options):
        [control] = media_control(MediaConfig(vector_bytes=1 << 20), self.config)
        options = {"workers": (media_worker,)} | options
        return Serving(self.folder, capabilities=(control,), **options), control

    def answers(self, serving: Serving, tag: str) -> list[list[int]]:
        rids = [f"{tag}{i}" for i in range(len(PROMPTS))]
        for rid, sound, prompt in zip(rids, self.sounds, PROMPTS, strict=True):
            serving.scheduler.add(self.request(rid, sound, prompt))
        serving.run()
        assert not [f for rid in rids if (f := serving.finish[rid]).type == "abort"]
        return [serving.tokens[rid] for rid in rids]

    def request(self, rid, sound, prompt) -> GenerateRequest:
        features, at = {"input_features": sound}, prompt.index(START)
        item = MediaItem(
            kind="audio",
            start=at,
            stop=at + 1,
            token_id=START,
            digest=digest_of("audio", features),
            features=features,
        )
        return GenerateRequest(
            rid=rid,
            input_ids=np.array(prompt, np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW, sampling_seed=1),
            media=(item,),
        )


@pytest.fixture(scope="module")
def ears(tmp_path_factory):
    return Ears(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "eager"},
        {"runner": "program"},
        {"runner": "program", "chunk_tokens": 2, "max_batch_tokens": 32},
        {"runner": "program", "preempt_every": 7},
    ],
)
def test_texts_equal_transformers(ears, options):
    expected = ears.expected()
    serving, control = ears.serving(**options)
    assert ears.answers(serving, "cold") == expected
    assert ears.answers(serving, "warm") == expected
    assert control.counts.encoded == 3  # sounds
    serving.close()
    assert ears.config.path == "native"


def test_the_sound_decides_the_text(ears):
    assert len({tuple(text) for text in ears.expected()}) > 1


def test_a_prompt_has_one_sound(ears):
    serving, _ = ears.serving(runner="eager")
    request = ears.request("two", ears.sounds[0], PROMPTS[0])
    request = msgspec.structs.replace(request, media=request.media * 2)
    serving.scheduler.add(request)
    serving.run()
    assert serving.finish["two"].type == "abort"
    assert "one item" in serving.finish["two"].message
    serving.close()


def test_texts_before_the_start_are_not_shared_between_sounds(ears):
    """Every token attends to the sound, also those before its placeholder."""
    before = (*range(20, 52), START, 7, 9)
    serving, _ = ears.serving(runner="program")
    cached = []
    for rid, sound in (("one", ears.sounds[0]), ("two", ears.sounds[1]), ("again", ears.sounds[0])):
        serving.scheduler.add(ears.request(rid, sound, before))
        serving.run()
        cached.append(serving.scheduler.load().cached_prompt_tokens)
    cold, _ = ears.serving(runner="program")
    cold.scheduler.add(ears.request("two", ears.sounds[1], before))
    cold.run()
    assert serving.tokens["two"] == cold.tokens["two"]
    assert serving.tokens["again"] == serving.tokens["one"] != serving.tokens["two"]
    assert cached[:2] == [0, 0]
    assert cached[2] >= 32
    serving.close()
    cold.close()


HEADS = ((1, 0), (1, 3), (2, 1))
SPEECH = (START, 7, 9, *range(30, 44), 2)  # three tokens before the text, and the end after it


def attended(ears, sound, ids, most) -> np.ndarray:
    """OpenAI's alignment from transformers' weights, (heads' mean of tokens, vectors)."""
    with torch.inference_mode():
        found = ears.model(
            input_features=torch.from_numpy(sound),
            decoder_input_ids=torch.tensor([ids]),
            output_attentions=True,
        ).cross_attentions
    weights = torch.stack([found[layer][0, head] for layer, head in HEADS])[..., :most]
    weights = weights / weights.sum(-1, keepdim=True)  # the softmax of these alone
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    return _median_filter((weights - mean) / std, 7).mean(0).numpy()


@pytest.fixture(scope="module")
def heads(ears):
    (ears.folder / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    ears.model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "eager"},
        {"runner": "program"},
        {"runner": "program", "chunk_tokens": 5, "max_batch_tokens": 32},
    ],
)
def test_what_tokens_attend_to_equals_transformers(ears, heads, options):
    serving, _ = ears.serving(**options)
    serving.scheduler.add(ears.request("cached", ears.sounds[0], SPEECH))
    serving.run()
    most = 24
    for rid, sound in (("one", ears.sounds[0]), ("two", ears.sounds[1])):
        request = ears.request(rid, sound, SPEECH)
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=1)
        serving.scheduler.add(msgspec.structs.replace(request, sampling=sampling, align=most))
    serving.scheduler.add(ears.request("beside", ears.sounds[2], PROMPTS[1]))
    serving.run()
    for rid, sound in (("one", ears.sounds[0]), ("two", ears.sounds[1])):
        expected = attended(ears, sound, SPEECH, most)
        found = [out.embedding for out in serving.outputs[rid] if out.embedding is not None]
        assert len(found) == 1
        assert found[0] == pytest.approx(expected, abs=2e-4)
        rows = expected[2:-1]  # from the one that predicts the first token of the text
        texts, vectors = _dynamic_time_warping(-rows.astype(np.float64))
        jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        assert token_starts(found[0][2:-1]).tolist() == (vectors[jumps] * 0.02).tolist()
    assert all(out.embedding is None for out in serving.outputs["beside"])
    serving.close()
