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

from tools.train.data.base import bucket, key_of  # noqa: E402
from tools.train.template import render  # noqa: E402
from tools.train.vision import questions  # noqa: E402
from tools.train.vision.draw import (  # noqa: E402
    BAR,
    BUILT_IN_FONT,
    COLOURS,
    SHAPES,
    Drawn,
    Mark,
    Thing,
    bars,
    scene,
    shade,
    written,
)
from tools.train.vision.export import export  # noqa: E402
from tools.train.vision.model import (  # noqa: E402
    IMAGE_TOKEN,
    SaplingVision,
    VisionConfig,
    places_of,
    sees,
    table_of_places,
)
from tools.train.vision.pretrain import (  # noqa: E402
    COLOUR_LABELS,
    MARK_LABELS,
    Loss,
    PatchLabeller,
    PretrainConfig,
    check,
    labels_of,
)
from tools.train.vision.pretrain import train as train_tower  # noqa: E402
from tools.train.vision.rows import (  # noqa: E402
    Amounts,
    Packer,
    Steps,
    load_tokenizer,
    pixels_of,
    seen_part,
)
from tools.train.vision.run import TrainConfig, Trainer, read_tower  # noqa: E402

TINY = TrainConfig(
    steps=4, shapes=2, words=1, texts=2, workers=0, check_every=100, check_per_class=1
)
OWN_FONT = (BUILT_IN_FONT,)


def test_a_step_is_the_same_whoever_draws_it() -> None:
    shape = VisionConfig()
    first, again = (Steps(1, Amounts(2, 1, 4), shape)[7] for _ in range(2))
    other = Steps(1, Amounts(2, 1, 4), shape)[8]
    for mine, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.targets, theirs.targets)
        np.testing.assert_array_equal(mine.segments, theirs.segments)
        np.testing.assert_array_equal(mine.pixels, theirs.pixels)
    assert not np.array_equal(first[0].pixels, other[0].pixels)


def test_training_shows_nothing_that_is_held_out() -> None:
    rng = random.Random(5)
    shown = [one for _ in range(300) for one in questions.trained(rng).questions]
    assert {one.kind for one in shown} == set(questions.CLASSES)
    assert all(bucket(one.key) == "train" for one in shown)
    asked = questions.evaluation_set(5, 3, fonts=OWN_FONT)
    assert all(bucket(example.keys[0]) == "test" for example in asked)


def test_pages_to_learn_characters_from_show_no_held_out_word_or_number() -> None:
    rng = random.Random(2)
    held_out = [f"{n}" for n in range(10, 100) if bucket(key_of("vision_number", n)) != "train"]
    assert held_out
    shown: set[str] = set()
    for _ in range(200):
        lines: dict[float, str] = {}
        for mark in questions.dense(rng, OWN_FONT).marks:
            if len(mark.name) == 1:
                lines[mark.y] = lines.get(mark.y, "") + mark.name
        shown |= set(lines.values())
    assert len(shown) > 200
    assert not shown & set(held_out)


def test_a_picture_shows_what_its_answer_says() -> None:
    rng = random.Random(1)
    for name in COLOURS:
        drawn = scene(rng, [Thing("square", name, 0.5, 0.5, 0.3)])
        picture = np.asarray(drawn.image)
        height, width, _ = picture.shape
        middle = picture[height // 2, width // 2].astype(int)
        near = {n: min(np.abs(middle - c).sum() for c in cs) for n, cs in COLOURS.items()}
        assert near[name] <= min(near.values()) + 90
        assert drawn.marks == [Mark("square", 0.5, 0.5, name)]
    for name in SHAPES:
        drawn = scene(rng, [Thing(name, "black", 0.3, 0.5, 0.2)])
        whole = np.asarray(drawn.image).min(2) < 100
        assert whole[:, : whole.shape[1] // 2].sum() > 20 * whole[:, -whole.shape[1] // 4 :].sum()
    assert all(0 <= part <= 255 for _ in range(50) for part in shade(rng, "pink"))


def ink_near(drawn: Drawn, mark: Mark) -> bool:
    """Whether something dark stands within a tenth of the width of a mark."""
    dark = np.asarray(drawn.image.convert("L")) < 128
    height, width = dark.shape
    x, reach = mark.x * width, 0.1 * width
    y = mark.y * height
    part = dark[max(0, int(y - reach)) : int(y + reach), max(0, int(x - reach)) : int(x + reach)]
    return bool(part.any())


def test_marks_say_where_characters_and_bars_stand() -> None:
    rng = random.Random(3)
    for text in ("7", "42", "hello", "Lima"):
        drawn = written(rng, text, OWN_FONT)
        assert "".join(mark.name for mark in drawn.marks) == text
        assert [mark.x for mark in drawn.marks] == sorted(mark.x for mark in drawn.marks)
        assert all(0 <= mark.x <= 1 and ink_near(drawn, mark) for mark in drawn.marks)
    chart = bars(rng, [9, 2], ["black", "blue"], OWN_FONT)
    assert [m.name for m in chart.marks] == [BAR, "A", "9", BAR, "B", "2"]
    assert [m.colour for m in chart.marks if m.name == BAR] == ["black", "blue"]
    assert all(ink_near(chart, mark) for mark in chart.marks)


def test_labels_name_the_marks_of_each_half_of_a_patch() -> None:
    shape = VisionConfig()
    marks = [Mark("a", 0.01, 0.01), Mark("7", 0.1, 0.01), Mark("star", 0.99, 0.99, "red")]
    names, hues = labels_of(Drawn(None, marks), shape)
    assert [MARK_LABELS[n] for n in names[0]] == ["a", "7"]
    assert MARK_LABELS[names[-1, 1]] == "star"
    assert COLOUR_LABELS[hues[-1]] == "red"
    assert (names > 0).sum() == 3
    assert (hues > 0).sum() == 1


def test_every_class_is_drawn_and_encoded() -> None:
    tokenizer, shape = load_tokenizer(), VisionConfig()
    examples = questions.evaluation_set(3, 1, fonts=OWN_FONT)
    assert [example.kind for example in examples] == list(questions.CLASSES)
    part = seen_part(Packer(tokenizer, shape), examples, shape)
    assert part.pixels.shape == (len(examples), 96, 96, 3)
    assert ((part.tokens == IMAGE_TOKEN).sum(1) == shape.num_tokens).all()
    for tokens, targets, example in zip(part.tokens, part.targets, examples, strict=True):
        said = tokenizer.decode(targets[targets >= 0].tolist())
        assert said == example.messages[-1]["content"]
        [end] = np.flatnonzero(targets == tokenizer.token_to_id("<|im_end|>"))
        text = tokenizer.decode(tokens[: end + 1].tolist(), skip_special_tokens=False)
        once = text.replace(questions.IMAGE * shape.num_tokens, questions.IMAGE)
        assert once + "<|im_end|>\n" == render(example.messages)
    assert pixels_of(examples[0].image(), 96).dtype == np.uint8


def test_questions_of_a_row_are_answered_as_if_each_were_alone() -> None:
    torch.manual_seed(1)
    tokenizer, shape = load_tokenizer(), VisionConfig()
    packer, model = Packer(tokenizer, shape), SaplingVision(shape)
    asked = [packer.asked("What is this?", "x", "a star"), packer.asked("Where?", "x", "left")]
    tokens, _, segments = packer.row(packer.prefix(), asked, 128)
    pixels = torch.randint(0, 256, (1, 96, 96, 3), dtype=torch.uint8)
    together = model.hidden(torch.tensor(tokens[None]), torch.tensor(segments[None]), pixels)
    for number, one in enumerate(asked, 1):
        alone, _, theirs = packer.row(packer.prefix(), [one], 128)
        row = model.hidden(torch.tensor(alone[None]), torch.tensor(theirs[None]), pixels)
        mine, other = together[0, segments == number], row[0, theirs == 1]
        assert mine.shape == other.shape
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.02, atol=0.02)


def test_segments_continue_the_picture_and_see_no_other_question() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 2, 2, 2, -1]])
    assert places_of(segments)[0, :7].tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert sees(segments)[0, 5].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def test_places_of_patches_differ() -> None:
    table = table_of_places(8, 192)
    apart = torch.cdist(table, table) + 100 * torch.eye(64)
    assert apart.min() > 0.1


@pytest.mark.slow
def test_the_tower_learns_colours_within_a_few_steps_and_is_taken_over(tmp_path) -> None:
    torch.manual_seed(1)
    labeller = PatchLabeller(VisionConfig())
    before = check(labeller, 1, 60, OWN_FONT)
    train_tower(labeller, PretrainConfig(steps=40, batch=32, workers=0), tmp_path / "tower")
    after = check(labeller, 1, 60, OWN_FONT)
    assert after["colours"] > max(0.5, 2 * before["colours"])
    model = SaplingVision()
    read_tower(model, tmp_path / "tower")
    pixels = torch.randint(0, 256, (1, 96, 96, 3), dtype=torch.uint8)
    theirs = labeller(pixels)[2]  # the last layer begins as the identity
    torch.testing.assert_close(model.vectors(pixels).float(), theirs[0], rtol=0.05, atol=0.1)


def test_the_loss_falls_where_vectors_say_what_stands_there() -> None:
    loss = Loss()
    names, hues = torch.zeros(1, 64, 2, dtype=torch.long), torch.zeros(1, 64, dtype=torch.long)
    names[0, 3, 0], hues[0, 3] = MARK_LABELS.index("star"), COLOUR_LABELS.index("red")
    heads = torch.zeros(1, 64, 2, len(MARK_LABELS)), torch.zeros(1, 64, len(COLOUR_LABELS))
    table, colours = loss.embeddings
    right = table[0].expand(1, 64, -1).clone()
    right[0, 3] = table[MARK_LABELS.index("star")] + colours[COLOUR_LABELS.index("red")]
    wrong = right.clone()
    wrong[0, 3] = table[MARK_LABELS.index("circle")] + colours[COLOUR_LABELS.index("red")]
    assert loss((*heads, right), names, hues) < loss((*heads, wrong), names, hues)


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
    texts = {
        processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        for parts in (asked, asked[::-1])
    }
    [text] = texts
    assert text == render(
        [{"role": "user", "content": "<image>What colour is this?"}], add_generation_prompt=True
    )
    picture = scene(random.Random(2), [Thing("circle", "red", 0.5, 0.5, 0.3)]).image
    given = processor(text=text, images=picture, return_tensors="pt")
    given["pixel_values"] = given["pixel_values"].to(torch.bfloat16)
    pixels = torch.from_numpy(pixels_of(picture, 96)[None].copy())
    with torch.inference_mode():
        theirs = model(**given).logits[0, -1].float()
        where = torch.tensor([given["input_ids"].shape[1] - 1])
        [mine] = trainer.average.logits(given["input_ids"], where, None, pixels)
    assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
