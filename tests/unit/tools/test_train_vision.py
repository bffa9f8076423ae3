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
from tools.train.model import rotary_tables  # noqa: E402
from tools.train.template import render  # noqa: E402
from tools.train.vision import questions  # noqa: E402
from tools.train.vision.draw import (  # noqa: E402
    BAR,
    BUILT_IN_FONT,
    COLOURS,
    HIGHEST,
    LAST,
    LOWEST,
    ORDERS,
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
from tools.train.vision.labels import (  # noqa: E402
    COLOUR_LABELS,
    MARK_LABELS,
    WORDS,
    Reading,
    embeddings,
    labels_of,
)
from tools.train.vision.model import (  # noqa: E402
    IMAGE_TOKEN,
    SaplingVision,
    VisionConfig,
    table_of_places,
)
from tools.train.vision.pretrain import (  # noqa: E402
    Loss,
    PatchLabeller,
    PretrainConfig,
    check,
    right_of,
    shares,
)
from tools.train.vision.pretrain import train as train_tower  # noqa: E402
from tools.train.vision.rows import (  # noqa: E402
    Amounts,
    Encoder,
    Read,
    Steps,
    pixels_of,
    seen_part,
)
from tools.train.vision.run import TrainConfig, Trainer, read_tower  # noqa: E402
from tools.train.vision.tokens import load_tokenizer  # noqa: E402

TINY = TrainConfig(
    steps=4, shapes=2, words=1, texts=2, workers=0, check_every=100, check_per_class=1
)
OWN_FONT = (BUILT_IN_FONT,)


def arrays_of(step: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for part in Steps(1, Amounts(2, 1, 4), VisionConfig())[step]:
        if isinstance(part, Read):
            found += [part.tokens.numpy(), part.targets.numpy()]
        else:
            found += [
                part.before,
                part.pixels,
                part.said,
                *(one for pair in part.asked for one in pair),
            ]
    return found


def test_a_step_is_the_same_whoever_draws_it() -> None:
    first, again, other = arrays_of(7), arrays_of(7), arrays_of(8)
    for mine, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(first[1], other[1])


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
    for _ in range(400):
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
        assert drawn.marks == [Mark("square", 0.5, 0.5, name, ("middle", "centre"))]
        assert drawn.count == 1
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
        assert [mark.more[0] for mark in drawn.marks] == list(ORDERS[: len(text)])
        assert [LAST in mark.more for mark in drawn.marks] == [False] * (len(text) - 1) + [True]
        assert all(0 <= mark.x <= 1 and ink_near(drawn, mark) for mark in drawn.marks)
    chart = bars(rng, [9, 2], ["black", "blue"], OWN_FONT)
    assert [m.name for m in chart.marks] == [BAR, "A", "9", BAR, "B", "2"]
    assert [m.colour for m in chart.marks if m.name == BAR] == ["black", "blue"]
    assert all(ink_near(chart, mark) for mark in chart.marks)
    known = [mark.more for mark in chart.marks if mark.name in "AB"]
    assert known == [("9", "black", HIGHEST), ("2", "blue", LOWEST)]


def test_labels_name_the_marks_of_each_half_of_a_patch() -> None:
    shape = VisionConfig()
    marks = [Mark("a", 0.01, 0.01), Mark("7", 0.1, 0.01), Mark("star", 0.99, 0.99, "red")]
    names, hues, _ = labels_of(Drawn(None, marks), shape)
    assert [MARK_LABELS[n] for n in names[0]] == ["a", "7"]
    assert MARK_LABELS[names[-1, 1]] == "star"
    assert COLOUR_LABELS[hues[-1]] == "red"
    assert (names > 0).sum() == 3
    assert (hues > 0).sum() == 1


def said_by(said: np.ndarray, patch: int) -> list[str]:
    return [WORDS[number - 1] for number in said[patch] if number]


def test_a_patch_says_all_that_is_known_of_its_mark_and_the_others_how_many_there_are() -> None:
    shape = VisionConfig()
    marks = [Mark("star", 0.3, 0.9, "red", ("bottom", "left"))]
    _, _, said = labels_of(Drawn(None, marks, count=1), shape)
    assert said_by(said, 7 * 8 + 2) == ["star", "red", "bottom", "left"]
    assert all(said_by(said, patch) == ["\n", "one"] for patch in range(56))
    _, _, untold = labels_of(Drawn(None, marks), shape)
    assert untold.any(1).sum() == 1


def test_characters_that_share_a_patch_speak_from_patches_next_to_each_other() -> None:
    shape = VisionConfig()
    for left in (0.02, 0.8):
        places = [left, left + 0.05, left + 0.1, left + 0.15]
        marks = [Mark(one, x, 0.5) for one, x in zip("Illi", places, strict=True)]
        _, _, said = labels_of(Drawn(None, marks), shape)
        spoken = [said_by(said, patch) for patch in range(64)]
        assert [one for one in spoken if one] == [["i"], ["l"], ["l"], ["i"]]


def test_the_words_of_patches_are_read_back_from_their_vectors() -> None:
    reading = Reading()
    assert len(reading.table) == len(WORDS) + 1 == len(embeddings())
    drawn = scene(random.Random(4), [Thing("cross", "pink", 0.2, 0.2, 0.1)])
    said = torch.from_numpy(labels_of(drawn, VisionConfig())[2]).long()
    tally = right_of(reading, reading.meant(said), said)
    assert tally == dict.fromkeys(("shapes", "colours", "rows", "columns"), (1, 1)) | {
        "counts": (63, 63)
    }
    assert set(shares([tally, tally]).values()) == {1.0}


def test_every_class_is_drawn_and_encoded() -> None:
    tokenizer, shape = load_tokenizer(), VisionConfig()
    examples = questions.evaluation_set(3, 1, fonts=OWN_FONT)
    assert [example.kind for example in examples] == list(questions.CLASSES)
    for example in examples:
        part = seen_part(Encoder(tokenizer), [example], shape)
        assert part.pixels.shape == (1, 96, 96, 3)
        [(tokens, targets)] = part.asked
        said = targets[targets >= 0].tolist()
        assert tokenizer.decode(said) == example.messages[-1]["content"]
        asked = tokens[0, 0, : np.flatnonzero(targets[0, 0] >= 0)[0] + 1].tolist()
        whole = tokenizer.decode([*part.before, *asked, *said], skip_special_tokens=False)
        assert whole + "\n" == render(example.messages).replace(questions.IMAGE, "")
    assert pixels_of(examples[0].image(), 96).dtype == np.uint8


def plain_states(model: SaplingVision, before, pixels, tokens) -> torch.Tensor:
    """Final states of one question, all of its row computed together."""
    body = model.language_model.model
    embedded = [body.embed_tokens(torch.tensor(one)).bfloat16() for one in (before, tokens)]
    x = torch.cat((embedded[0], model.vectors(pixels)[0].bfloat16(), embedded[1]))[None]
    cos, sin = rotary_tables(torch.arange(x.shape[1]), body.config)
    for layer in body.layers:
        x = layer(x, cos, sin)
    return body.norm(x)[0, -len(tokens) :]


def test_questions_about_a_picture_are_answered_as_if_each_were_alone() -> None:
    torch.manual_seed(1)
    tokenizer, model = load_tokenizer(), SaplingVision(VisionConfig())
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.05)  # which begin as zeros
    before = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
    asked = torch.randint(300, 4000, (2, 3, 9))
    pixels = torch.randint(0, 256, (2, 96, 96, 3), dtype=torch.uint8)
    groups = [asked[:, :2], asked[:, 2:, :5]]
    found = model.hidden(torch.tensor(before), model.vectors(pixels), groups)
    assert [one.shape[:3] for one in found] == [(2, 2, 9), (2, 1, 5)]
    for group, states in zip(groups, found, strict=True):
        for row in range(2):
            for column in range(group.shape[1]):
                alone = plain_states(
                    model, before, pixels[row : row + 1], group[row, column].tolist()
                )
                mine = states[row, column].float()
                assert (mine - alone.float()).norm() < 0.03 * alone.float().norm()


def test_places_of_patches_differ() -> None:
    table = table_of_places(8, 192)
    apart = torch.cdist(table, table) + 100 * torch.eye(64)
    assert apart.min() > 0.1


@pytest.mark.slow
def test_the_tower_learns_colours_within_a_few_steps_and_is_taken_over(tmp_path) -> None:
    torch.manual_seed(1)
    labeller = PatchLabeller(VisionConfig())
    before = shares(check(labeller, 1, 60, OWN_FONT))
    train_tower(labeller, PretrainConfig(steps=60, batch=32, workers=0), tmp_path / "tower")
    after = shares(check(labeller, 1, 60, OWN_FONT))
    assert after["colours"] > max(0.4, 2 * before["colours"])
    model = SaplingVision()
    read_tower(model, tmp_path / "tower")
    pixels = torch.randint(0, 256, (1, 96, 96, 3), dtype=torch.uint8)
    assert torch.equal(model.vectors(pixels).float(), labeller(pixels)[2])


def test_the_loss_falls_where_vectors_say_what_stands_there() -> None:
    loss = Loss()
    marks = [Mark("star", 0.3, 0.9, "red", ("bottom", "left"))]
    labels = labels_of(Drawn(None, marks, count=1), VisionConfig())
    names, hues, said = (torch.from_numpy(one[None]).long() for one in labels)
    heads = torch.zeros(1, 64, 2, len(MARK_LABELS)), torch.zeros(1, 64, len(COLOUR_LABELS))
    right = loss.reading.meant(said)
    wrong = right.clone()
    star, circle = (loss.reading.table[1 + WORDS.index(one)] for one in ("star", "circle"))
    wrong[0, 58] += circle - star
    assert loss((*heads, right), names, hues, said) < loss((*heads, wrong), names, hues, said)


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
    ids = given["input_ids"]
    at = (ids[0] == IMAGE_TOKEN).nonzero()[:, 0]
    with torch.inference_mode():
        theirs = model(**given).logits[0, -1].float()
        asked = ids[0, at[-1] + 1 :][None, None]
        [states] = trainer.average.hidden(ids[0, : at[0]], trainer.average.vectors(pixels), [asked])
        mine = trainer.average.language_model.head(states)[0, 0, -1]
    assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
