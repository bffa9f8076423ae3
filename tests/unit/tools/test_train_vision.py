"""Pictures and questions of sapling-vision's training, and a run that was interrupted."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.train.data.base import bucket  # noqa: E402
from tools.train.template import render  # noqa: E402
from tools.train.vision import questions  # noqa: E402
from tools.train.vision.draw import COLOURS, SHAPES, Thing, scene, shade  # noqa: E402
from tools.train.vision.export import export  # noqa: E402
from tools.train.vision.model import IMAGE_TOKEN, VisionConfig, table_of_places  # noqa: E402
from tools.train.vision.rows import Steps, load_tokenizer, pixels_of, seen_part  # noqa: E402
from tools.train.vision.run import TrainConfig, Trainer  # noqa: E402

TINY = TrainConfig(
    steps=4, images=2, texts=2, workers=0, check_every=100, save_every=100, check_per_class=1
)


def test_a_step_is_the_same_whoever_draws_it() -> None:
    shape = VisionConfig()
    first, again = (Steps(1, 3, 4, shape)[7] for _ in range(2))
    other = Steps(1, 3, 4, shape)[8]
    for mine, theirs in zip(first, again, strict=True):
        for left, right in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(left, right)
    assert not np.array_equal(first[0][2], other[0][2])


def test_training_shows_nothing_that_is_held_out() -> None:
    rng = random.Random(5)
    shown = [questions.drawn(rng) for _ in range(400)]
    assert {example.kind for example in shown} == set(questions.CLASSES)
    assert all(bucket(key) == "train" for example in shown for key in example.keys)
    asked = questions.evaluation_set(5, 3)
    assert all(bucket(example.keys[0]) == "test" for example in asked)


def test_a_picture_shows_what_its_answer_says() -> None:
    rng = random.Random(1)
    for name in COLOURS:
        picture = np.asarray(scene(rng, [Thing("square", name, 0.5, 0.5, 0.3)]))
        height, width, _ = picture.shape
        middle = picture[height // 2, width // 2].astype(int)
        near = {n: min(np.abs(middle - c).sum() for c in cs) for n, cs in COLOURS.items()}
        assert near[name] <= min(near.values()) + 90
    for name in SHAPES:
        whole = np.asarray(scene(rng, [Thing(name, "black", 0.3, 0.5, 0.2)])).min(2) < 100
        assert whole[:, : whole.shape[1] // 2].sum() > 20 * whole[:, -whole.shape[1] // 4 :].sum()
    assert all(0 <= part <= 255 for _ in range(50) for part in shade(rng, "pink"))


def test_every_class_is_drawn_and_encoded() -> None:
    tokenizer, shape = load_tokenizer(), VisionConfig()
    examples = questions.evaluation_set(3, 1)
    assert [example.kind for example in examples] == list(questions.CLASSES)
    tokens, targets, pictures = seen_part(tokenizer, examples, shape)
    assert pictures is not None
    assert pictures.shape == (len(examples), 96, 96, 3)
    assert ((tokens == IMAGE_TOKEN).sum(1) == shape.num_tokens).all()
    for row, example in zip(targets, examples, strict=True):
        said = tokenizer.decode(row[row >= 0].tolist())
        assert said == example.messages[-1]["content"]
    assert pixels_of(examples[0].image(), 96).dtype == np.uint8


def test_places_of_patches_differ() -> None:
    table = table_of_places(12, 192)
    apart = torch.cdist(table, table) + 100 * torch.eye(144)
    assert apart.min() > 0.1


@pytest.mark.slow
def test_a_resumed_run_equals_one_in_one_piece(tmp_path) -> None:
    whole = Trainer(TINY, tmp_path / "a")
    whole.run()
    halves = Trainer(TINY, tmp_path / "b")
    halves.run(until=2)
    resumed = Trainer(TINY, tmp_path / "b")
    resumed.load(tmp_path / "b" / "last.pt")
    resumed.run()
    assert resumed.step == whole.step == 4
    for name, tensor in whole.average.state_dict().items():
        assert torch.equal(tensor, resumed.average.state_dict()[name]), name


@pytest.mark.slow
def test_the_export_computes_in_transformers_what_was_trained(tmp_path) -> None:
    import transformers

    trainer = Trainer(TINY, tmp_path)
    with torch.no_grad():
        for name, parameter in trainer.average.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                parameter.normal_(0, 0.05)  # which begin as zeros
    trainer.export(tmp_path)
    export(tmp_path / "average.safetensors", tmp_path / "model")
    model, report = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model", backend="pil")
    asked = [{"type": "image"}, {"type": "text", "text": "What colour is this?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True
    )
    assert text == render(
        [{"role": "user", "content": "<image>What colour is this?"}], add_generation_prompt=True
    )
    picture = scene(random.Random(2), [Thing("circle", "red", 0.5, 0.5, 0.3)])
    given = processor(text=text, images=picture, return_tensors="pt")
    given["pixel_values"] = given["pixel_values"].to(torch.bfloat16)
    pixels = torch.from_numpy(pixels_of(picture, 96)[None].copy())
    with torch.inference_mode():
        theirs = model(**given).logits[0, -1].float()
        where = torch.tensor([given["input_ids"].shape[1] - 1])
        [mine] = trainer.average.logits(given["input_ids"], where, pixels)
    assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
