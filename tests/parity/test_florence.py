"""Florence-2 reads images and texts with one encoder, and answers as in transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from sylvan.config.media import MediaConfig
from sylvan.media.processor import digest_of
from sylvan.protocol.media import MediaItem
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.tokenizer.checks import CheckedPrompt
from sylvan.runtime.tokenizer.encoder_prompts import encoded_prompt
from sylvan.runtime.tokenizer.types import ServedModelInfo
from tests.parity.serving import Serving

VOCAB, IMAGE, NEW = 300, 300, 8  # the placeholder is behind the vocabulary, as published
VECTORS = 5  # of an image: four places and their mean
STARTS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}


@pytest.fixture(scope="module")
def florence(tmp_path_factory):
    folder = tmp_path_factory.mktemp("florence")
    torch.manual_seed(5)
    text = transformers.BartConfig(
        vocab_size=VOCAB + 1,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        forced_eos_token_id=None,
        **STARTS,
    )
    vision = transformers.Florence2VisionConfig(
        depths=(1, 1),
        patch_size=(7, 3),
        patch_stride=(4, 2),
        patch_padding=(3, 1),
        patch_prenorm=(False, True),
        embed_dim=(16, 32),
        num_heads=(2, 4),
        num_groups=(2, 4),
        window_size=2,
        projection_dim=32,
    )
    config = transformers.Florence2Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_id=IMAGE, **STARTS
    )
    model = transformers.Florence2ForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder, model


def prompts() -> list[tuple[list[int], list[np.ndarray]]]:
    rng = np.random.default_rng(2)
    images = [rng.normal(size=(1, 3, 16, 16)).astype(np.float32) for _ in range(3)]
    made = [([0, 7, 8, 9, 2], [])]
    for held in ([images[0]], [images[1], images[2]], [images[0]]):
        ids = [IMAGE] * (VECTORS * len(held)) + [0, *rng.integers(5, 250, 4).tolist(), 2]
        made.append((ids, held))
    return made


def requests(config) -> list[GenerateRequest]:
    facts = ServedModelInfo(
        model_path="",
        served_name="",
        context_len=64,
        vocab_size=VOCAB,
        decoder_prompt=config.media.decoder_prompt,
        encoder_len=64,
        extra={"image_token_id": IMAGE},
    )
    found = []
    for number, (ids, images) in enumerate(prompts()):
        media = [
            MediaItem(
                kind="image",
                start=VECTORS * place,
                stop=VECTORS * (place + 1),
                token_id=IMAGE,
                digest=digest_of("image", {"pixel_values": image}),
                features={"pixel_values": image},
            )
            for place, image in enumerate(images)
        ]
        prompt, item = encoded_prompt(CheckedPrompt(ids, "text"), None, facts, media)
        found.append(
            GenerateRequest(
                rid=f"r{number}",
                input_ids=np.array(prompt.ids, np.int32),
                output_ids=np.empty(0, np.int32),
                sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW, sampling_seed=1),
                media=(item,),
            )
        )
    return found


def expected(model) -> list[list[int]]:
    answers = []
    for ids, images in prompts():
        seen = {"pixel_values": torch.from_numpy(np.concatenate(images))} if images else {}
        out = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            forced_eos_token_id=None,
            **seen,
        )
        answers.append(out[0, 1:].tolist())
    return answers


@pytest.mark.parametrize(
    "options", [{"runner": "eager"}, {"runner": "program", "preempt_every": 5}]
)
def test_answers_equal_transformers(florence, options):
    folder, model = florence
    config = load_config(folder)
    assert config.path == "native"
    [control] = media_control(MediaConfig(), config)
    serving = Serving(folder, capabilities=(control,), workers=(media_worker,), **options)
    for _ in range(2):  # cold and warm
        for request in requests(config):
            serving.scheduler.add(request)
        serving.run()
        assert not [f for f in serving.finish.values() if f.type == "abort"]
        found = [serving.tokens.pop(f"r{n}") for n in range(4)]
        assert found == expected(model)
        assert control.counts.encoded == 4
    serving.close()
