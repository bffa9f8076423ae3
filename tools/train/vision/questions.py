"""Pictures to ask about, and questions with their answers.

A `Subject` is drawn only when asked for: whether a question belongs to a split is known before.
Several questions about one picture are trained on at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.train.data.base import (
    Example,
    assistant,
    bucket,
    casual,
    choose,
    key_of,
    made_up,
    maybe_system,
    user,
)
from tools.train.data.words import NAMES, NOUNS
from tools.train.vision.draw import (
    COLOURS,
    SHAPES,
    Drawn,
    Thing,
    bars,
    installed_fonts,
    page,
    scattered,
    scene,
    written,
)

IMAGE = "<image>"
PLACES = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)
Fonts = Sequence[str]
Drawing = Callable[[random.Random, Fonts], Drawn]
_NAMES = tuple(COLOURS)
MAX_COUNTED = 4


@dataclass(frozen=True)
class Question:
    """One question about a picture; `key` names the combination that it shows."""

    kind: str
    text: str
    answer: str
    key: str


@dataclass(frozen=True)
class Subject:
    """A picture to be drawn, and questions about it."""

    draw: Drawing
    questions: Sequence[Question]


def _a(colour: str, shape: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"


def _ask(
    rng: random.Random,
    kind: str,
    templates: Sequence[str],
    answer: str,
    key: Sequence[object],
    **words: str,
) -> Question:
    which, text = choose(rng, templates)
    if rng.random() < 0.3:
        text = text.replace("colour", "color")
    return Question(kind, text.format(**words), answer, key_of("vision", kind, *key, which))


def _pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Different shapes in different colours."""
    shapes, colours = rng.sample(SHAPES, count), rng.sample(_NAMES, count)
    return list(zip(shapes, colours, strict=True))


def _colour(rng: random.Random, shape: str, colour: str) -> Question:
    templates = (
        "What colour is the {s}?",
        "Which colour does the {s} have?",
        "Colour of the {s}?",
        "What colour is this?",
        "Which colour do you see?",
        "What colour is it?",
    )
    return _ask(rng, "vision_colour", templates, colour, (shape, colour), s=shape)


def _shape(rng: random.Random, shape: str, colour: str) -> Question:
    templates = (
        "What shape is this?",
        "Which shape do you see?",
        "What shape is in the picture?",
        "Which shape is drawn here?",
        "Name the shape.",
    )
    return _ask(rng, "vision_shape", templates, shape, (shape, colour))


def _describe(rng: random.Random, pairs: Sequence[tuple[str, str]]) -> Question:
    templates = (
        "Describe the picture.",
        "What do you see?",
        "What is in the picture?",
        "Describe this image.",
        "What is in this image?",
        "What is this?",
    )
    answer = " and ".join(_a(c, s) for s, c in pairs)
    return _ask(rng, "vision_describe", templates, answer, tuple(pairs))


def _count(rng: random.Random, pairs: Sequence[tuple[str, str]]) -> Question:
    templates = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
    key = (len(pairs), "shapes", len(pairs), *sorted(pairs)[:2])
    return _ask(rng, "vision_count", templates, str(len(pairs)), key)


def few(rng: random.Random) -> Subject:
    """One or two shapes, anywhere."""
    pairs = _pairs(rng, rng.choice((1, 2)))
    asked = [_describe(rng, pairs) for _ in range(3)] + [_count(rng, pairs)]
    if len(pairs) == 1:
        asked += [ask(rng, *pairs[0]) for ask in (_colour, _shape) for _ in range(3)]
    size = (0.12, 0.42) if len(pairs) == 1 else (0.11, 0.24)

    def draw(r: random.Random, _: Fonts) -> Drawn:
        things = scattered(r, pairs, size)
        while len(pairs) == 2 and things[1].x - things[0].x < 0.15:
            things = scattered(r, pairs, (size[0], 0.2))
        return scene(r, r.sample(things, len(things)))

    return Subject(draw, asked)


def crowd(rng: random.Random) -> Subject:
    """Up to four shapes, some of them alike, to count."""
    number = rng.randint(1, MAX_COUNTED)
    kinds, hues = rng.sample(SHAPES, rng.randint(1, 3)), rng.sample(_NAMES, rng.randint(1, 3))
    pairs = [(rng.choice(kinds), rng.choice(hues)) for _ in range(number)]
    asked = [_count(rng, pairs) for _ in range(3)]
    return Subject(lambda r, _: scene(r, scattered(r, pairs, (0.08, 0.15))), asked)


def placed(rng: random.Random) -> Subject:
    """A shape at a place that has a name."""
    [(shape, colour)] = _pairs(rng, 1)
    row, column = rng.randrange(3), rng.randrange(3)
    templates = ("Where is the {s}?", "Where is the {c} {s}?", "Where is the {c} one?")
    key = (row, column, shape, colour)
    asked = [
        _ask(rng, "vision_place", templates, PLACES[row][column], key, s=shape, c=colour)
        for _ in range(4)
    ]
    asked += [_colour(rng, shape, colour), _shape(rng, shape, colour)]

    def draw(r: random.Random, _: Fonts) -> Drawn:
        size = r.uniform(0.09, 0.16)
        x, y = (
            min(max(0.5 + (at - 1) * 0.33 + r.uniform(-0.06, 0.06), size), 1 - size)
            for at in (column, row)
        )
        return scene(r, [Thing(shape, colour, x, y, size)])

    return Subject(draw, asked)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.choice((1, 1, 2, 2, 3, 4))))


def _word(rng: random.Random) -> str:
    """Two to five letters, in lower case."""
    while True:
        way = rng.random()
        word = rng.choice(NOUNS) if way < 0.35 else made_up(rng, capital=False)
        if 0.35 <= way < 0.5:
            word = rng.choice(NAMES)
        if 2 <= len(word) <= 5 and word.isascii() and word.isalpha():
            return word.lower()


def _styled(rng: random.Random, word: str) -> str:
    style = rng.random()
    return word if style < 0.5 else word.upper() if style < 0.75 else word.capitalize()


def _characters(rng: random.Random, text: str, noun: str, key: str) -> list[Question]:
    """Questions about single characters of a text, and how many there are."""
    ways = (
        (f"What is the first {noun}?", text[0]),
        (f"What is the last {noun}?", text[-1]),
        (f"How many {noun}s are there?", str(len(text))),
    )
    found = rng.sample(ways, 2) if len(text) > 1 else []
    return [Question("vision_character", asked, answer, key) for asked, answer in found]


def number(rng: random.Random) -> Subject:
    """A number of up to four digits."""
    text = _number(rng)
    templates = (
        "Which number is this?",
        "What number do you see?",
        "Read the number.",
        "What is the number?",
        "What number is in the picture?",
    )
    if len(text) == 1:
        asked = _ask(rng, "vision_number", templates, text, (text,))
    else:
        asked = Question(
            "vision_number", rng.choice(templates), text, key_of("vision_number", text)
        )
    more = _characters(rng, text, "digit", asked.key)
    return Subject(lambda r, fonts: written(r, text, fonts), [asked, *more])


def word(rng: random.Random) -> Subject:
    """A word of two to five letters, in whatever case; its letters are answered in lower case."""
    chosen = _word(rng)
    text = _styled(rng, chosen)
    asked = _characters(rng, chosen, "letter", key_of("vision_read", chosen))
    return Subject(lambda r, fonts: written(r, text, fonts), asked)


def chart(rng: random.Random) -> Subject:
    """A bar chart: the highest bar, its colour, its value, or how many bars there are."""
    size = rng.randint(2, 4)
    values, colours = rng.sample(range(1, 10), size), rng.sample(_NAMES, size)
    high = values.index(max(values))
    found = (
        (("Which bar is the highest?", "Which bar is the tallest?"), "ABCD"[high]),
        (("What colour is the highest bar?", "What colour is the tallest bar?"), colours[high]),
        (("What is the highest value?", "What is the largest value?"), str(values[high])),
        (("How many bars are there?", "How many bars do you see?"), str(size)),
    )
    asked = [
        _ask(rng, "vision_chart", templates, answer, (*values,)) for templates, answer in found
    ]
    return Subject(lambda r, fonts: bars(r, values, colours, fonts), asked)


SUBJECTS: dict[str, Callable[[random.Random], Subject]] = {
    "few": few,
    "crowd": crowd,
    "placed": placed,
    "number": number,
    "word": word,
    "chart": chart,
}
WEIGHTS: dict[str, float] = {
    "few": 3.0,
    "crowd": 1.0,
    "placed": 2.0,
    "number": 3.0,
    "word": 1.0,
    "chart": 2.0,
}
CLASSES: dict[str, tuple[str, ...]] = {
    "vision_shape": ("few",),
    "vision_colour": ("few",),
    "vision_count": ("crowd",),
    "vision_place": ("placed",),
    "vision_describe": ("few",),
    "vision_number": ("number",),
    "vision_character": ("number", "word"),
    "vision_chart": ("chart",),
}
"""Classes of the evaluation, and the subjects that ask such questions."""


def subject(name: str, rng: random.Random, split: str) -> Subject:
    """A subject with those of its questions that belong to a split, at least one."""
    while True:
        made = SUBJECTS[name](rng)
        kept = [one for one in made.questions if bucket(one.key) == split]
        if kept:
            return Subject(made.draw, kept)


def trained(rng: random.Random) -> Subject:
    """A subject of the training split."""
    [name] = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    return subject(name, rng, "train")


def dense(rng: random.Random, fonts: Fonts) -> Drawn:
    """A picture with much on it, for the tower to learn from alone: nothing that is held out."""
    way = rng.random()
    if way < 0.35:
        texts: list[str] = []
        while len(texts) < 4:
            if rng.random() < 0.35:
                text = _number(rng)
                held = bucket(key_of("vision_number", text)) != "train" and len(text) > 1
            else:
                word = _word(rng)
                text = _styled(rng, word)
                held = bucket(key_of("vision_read", word)) != "train"
            if not held:
                texts.append(text)
        return page(rng, texts, fonts)
    return trained(rng).draw(rng, fonts)


def _example(rng: random.Random, made: Subject, asked: Question, fonts: Fonts) -> Example:
    seed = rng.getrandbits(48)
    messages = [
        *maybe_system(rng, 0.1),
        user(IMAGE + casual(rng, asked.text)),
        assistant(asked.answer),
    ]
    example = Example(asked.kind, messages, (asked.key,))
    example.image = lambda: made.draw(random.Random(seed), fonts).image
    return example


def evaluation_set(
    seed: int, per_class: int, split: str = "test", fonts: Fonts | None = None
) -> list[Example]:
    """The same number of held-out examples of every class."""
    fonts = fonts or installed_fonts()
    found: list[Example] = []
    for kind, names in CLASSES.items():
        rng = random.Random(f"{seed}:{split}:{kind}")
        of_kind: list[Example] = []
        while len(of_kind) < per_class:
            made = subject(rng.choice(names), rng, split)
            asked: Any = [one for one in made.questions if one.kind == kind]
            if asked:
                of_kind.append(_example(rng, made, rng.choice(asked), fonts))
        found += of_kind
    return found
