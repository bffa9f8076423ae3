"""Questions about drawn pictures, and their answers: one generator for each class.

Pictures are drawn only when asked for: whether an example belongs to a split is known before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tools.train.data.base import (
    Example,
    assistant,
    belongs,
    casual,
    choose,
    key_of,
    made_up,
    maybe_system,
    user,
)
from tools.train.data.words import NAMES, NOUNS
from tools.train.vision.draw import COLOURS, SHAPES, Thing, bars, pie, scattered, scene, written

IMAGE = "<image>"
PLACES = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)
Drawing = Callable[[random.Random], Any]
_NAMES = tuple(COLOURS)
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def _a(colour: str, shape: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"


def _example(
    rng: random.Random,
    kind: str,
    asked: str,
    answer: str,
    key: Sequence[object],
    draw: Drawing,
) -> Example:
    seed = rng.getrandbits(48)
    if rng.random() < 0.3:
        asked = asked.replace("colour", "color")
    text = casual(rng, asked)
    content = text + IMAGE if rng.random() < 0.1 else IMAGE + text
    messages = [*maybe_system(rng, 0.1), user(content), assistant(answer)]
    made = Example(kind, messages, (key_of("vision", kind, *key),))
    made.image = lambda: draw(random.Random(seed))
    return made


def _pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Different shapes in different colours."""
    shapes, colours = rng.sample(SHAPES, count), rng.sample(_NAMES, count)
    return list(zip(shapes, colours, strict=True))


def shape(rng: random.Random) -> Example:
    """One shape: which?"""
    name, colour = rng.choice(SHAPES), rng.choice(_NAMES)
    which, asked = choose(
        rng,
        (
            "What shape is this?",
            "Which shape do you see?",
            "What shape is in the picture?",
            "Which shape is drawn here?",
            "Name the shape.",
        ),
    )
    key = (name, colour, which)
    return _example(
        rng,
        "vision_shape",
        asked,
        name,
        key,
        lambda r: scene(r, scattered(r, [(name, colour)], (0.12, 0.45))),
    )


def colour(rng: random.Random) -> Example:
    """One to three shapes: which colour has this one?"""
    pairs = _pairs(rng, rng.choice((1, 1, 2, 2, 3)))
    (name, answer), others = pairs[0], pairs[1:]
    templates = ["What colour is the {s}?", "Which colour does the {s} have?", "Colour of the {s}?"]
    if not others:
        templates += ["What colour is this?", "Which colour do you see?"]
    which, asked = choose(rng, templates)
    key = (name, answer, which, *sorted(others))
    return _example(
        rng,
        "vision_colour",
        asked.format(s=name),
        answer,
        key,
        lambda r: scene(r, scattered(r, _shuffled(r, pairs), (0.1, 0.26))),
    )


def _shuffled(rng: random.Random, items: Sequence[Any]) -> list[Any]:
    return rng.sample(list(items), len(items))


def count(rng: random.Random) -> Example:
    """How many of these are there?"""
    number, others = rng.randint(0, 8), rng.choice((0, 0, 1, 2, 3))
    name, hue = rng.choice(SHAPES), rng.choice(_NAMES)
    way = rng.choice(("shapes", "kind", "kind", "colour"))
    if way == "shapes":
        number, others = max(number, 1), 0
        pairs = [(rng.choice(SHAPES), rng.choice(_NAMES)) for _ in range(number)]
        noun = "shapes"
    elif way == "kind":
        rest = [s for s in SHAPES if s != name]
        pairs = [(name, rng.choice(_NAMES)) for _ in range(number)]
        pairs += [(rng.choice(rest), rng.choice(_NAMES)) for _ in range(others)]
        noun = "crosses" if name == "cross" else f"{name}s"
    else:
        rest = [c for c in _NAMES if c != hue]
        pairs = [(rng.choice(SHAPES), hue) for _ in range(number)]
        pairs += [(rng.choice(SHAPES), rng.choice(rest)) for _ in range(others)]
        noun = f"{hue} shapes"
    which, asked = choose(
        rng, ("How many {n} are there?", "How many {n} do you see?", "Count the {n}.")
    )
    key = (number, others, noun, which, *sorted(pairs)[:2])
    return _example(
        rng,
        "vision_count",
        asked.format(n=noun),
        str(number),
        key,
        lambda r: scene(r, scattered(r, _shuffled(r, pairs), (0.07, 0.13))),
    )


def place(rng: random.Random) -> Example:
    """Where is this shape?"""
    name, hue = rng.choice(SHAPES), rng.choice(_NAMES)
    row, column = rng.randrange(3), rng.randrange(3)
    which, asked = choose(
        rng, ("Where is the {s}?", "Where is the {c} {s}?", "In which part is the {s}?")
    )

    def draw(r: random.Random) -> Any:
        size = r.uniform(0.09, 0.16)
        x, y = (
            min(max(0.5 + (at - 1) * 0.33 + r.uniform(-0.06, 0.06), size), 1 - size)
            for at in (column, row)
        )
        return scene(r, [Thing(name, hue, x, y, size)])

    key = (row, column, name, hue, which)
    return _example(
        rng, "vision_place", asked.format(s=name, c=hue), PLACES[row][column], key, draw
    )


def relation(rng: random.Random) -> Example:
    """Three shapes in a row or a column: which one is beside this one?"""
    pairs = _pairs(rng, 3)
    upright = rng.random() < 0.5
    first = rng.randrange(2)
    after = rng.random() < 0.5  # asked about the right or lower neighbour of `first`
    words = ("above", "below") if upright else ("left of", "right of")
    known, wanted = (pairs[first], pairs[first + 1]) if after else (pairs[first + 1], pairs[first])
    which, asked = choose(
        rng, ("What is {w} the {c} {s}?", "What is {w} the {s}?", "Which shape is {w} the {s}?")
    )
    if rng.random() < 0.5 and not upright:
        asked = asked.replace("{w}", "to the {w}")
    word = words[after]

    def draw(r: random.Random) -> Any:
        things: list[Thing] = []
        for index, (shape_, colour_) in enumerate(pairs):
            along = 1 / 6 + index / 3 + r.uniform(-0.02, 0.02)
            across = 0.5 + r.uniform(-0.2, 0.2)
            x, y = (across, along) if upright else (along, across)
            things.append(Thing(shape_, colour_, x, y, r.uniform(0.09, 0.13)))
        return scene(r, things)

    key = (word, which, *known, *wanted)
    text = asked.format(w=word, c=known[1], s=known[0])
    return _example(rng, "vision_relation", text, _a(wanted[1], wanted[0]), key, draw)


def exists(rng: random.Random) -> Example:
    """Is there such a shape?"""
    pairs = _pairs(rng, rng.choice((1, 2, 2, 3)))
    there = rng.random() < 0.5
    name, hue = pairs[0]
    if not there:
        absent = [
            (s, c)
            for s in SHAPES
            for c in _NAMES
            if (s, c) not in pairs and (s == name or c == hue or rng.random() < 0.1)
        ]
        name, hue = rng.choice(absent)
    which, asked = choose(rng, ("Is there {a}?", "Do you see {a}?", "Is {a} in the picture?"))
    key = (there, name, hue, which, *sorted(pairs))
    return _example(
        rng,
        "vision_exists",
        asked.format(a=_a(hue, name)),
        "yes" if there else "no",
        key,
        lambda r: scene(r, scattered(r, _shuffled(r, pairs), (0.1, 0.24))),
    )


def describe(rng: random.Random) -> Example:
    """One or two shapes, from left to right."""
    pairs = _pairs(rng, rng.choice((1, 2, 2)))
    which, asked = choose(
        rng,
        (
            "Describe the picture.",
            "What do you see?",
            "What is in the picture?",
            "Describe this image.",
            "What is in this image?",
            "What is this?",
        ),
    )

    def draw(r: random.Random) -> Any:
        things = scattered(r, pairs, (0.12, 0.26))
        while len(things) == 2 and things[1].x - things[0].x < 0.15:
            things = scattered(r, pairs, (0.12, 0.22))
        return scene(r, things)

    answer = " and ".join(_a(c, s) for s, c in pairs)
    key = (which if len(pairs) == 1 else "", *pairs)
    return _example(rng, "vision_describe", asked, answer, key, draw)


def number(rng: random.Random) -> Example:
    """A number of up to four digits."""
    text = str(rng.randrange(10 ** rng.choice((1, 1, 2, 2, 3, 4))))
    which, asked = choose(
        rng,
        (
            "Which number is this?",
            "What number do you see?",
            "Read the number.",
            "What is the number?",
            "What number is in the picture?",
        ),
    )
    key = (text, which if len(text) == 1 else "")
    return _example(rng, "vision_number", asked, text, key, lambda r: written(r, text))


def read(rng: random.Random) -> Example:
    """A word of two to eight letters."""
    while True:
        way = rng.random()
        word = rng.choice(NOUNS) if way < 0.3 else made_up(rng, capital=False)
        if 0.3 <= way < 0.45:
            word = rng.choice(NAMES)
        if 2 <= len(word) <= 8:
            break
    style = rng.random()
    text = word if style < 0.5 else word.upper() if style < 0.75 else word.capitalize()
    _, asked = choose(
        rng,
        (
            "What does it say?",
            "Read the text.",
            "What is written here?",
            "Read the word.",
            "Which word is this?",
            "What does the picture say?",
            "What text is in the picture?",
        ),
    )
    return _example(rng, "vision_read", asked, text, (word.lower(),), lambda r: written(r, text))


def total(rng: random.Random) -> Example:
    """A sum or difference that is written in the picture."""
    first, second = rng.randint(0, 20), rng.randint(0, 20)
    minus = rng.random() < 0.4
    if minus:
        first, second = max(first, second), min(first, second)
    sign = "-" if minus else "+"
    answer = first - second if minus else first + second
    text = f"{first} {sign} {second}" + (" =" if rng.random() < 0.4 else "")
    _, asked = choose(
        rng, ("What is the result?", "What is the answer?", "Work this out.", "Solve it.")
    )
    key = (first, sign, second)
    return _example(rng, "vision_sum", asked, str(answer), key, lambda r: written(r, text))


def chart(rng: random.Random) -> Example:
    """A bar chart: the highest, the lowest, a value, a colour or how many."""
    size = rng.randint(2, 5)
    values, colours = rng.sample(range(1, 10), size), rng.sample(_NAMES, size)
    letters = "ABCDE"[:size]
    at = rng.randrange(size)
    high, low = values.index(max(values)), values.index(min(values))
    which, (asked, answer) = rng.choice(
        list(
            enumerate(
                (
                    ("Which bar is the highest?", letters[high]),
                    ("Which bar is the tallest?", letters[high]),
                    ("Which bar is the lowest?", letters[low]),
                    ("Which bar is the shortest?", letters[low]),
                    (f"What is the value of {letters[at]}?", str(values[at])),
                    (f"How high is bar {letters[at]}?", str(values[at])),
                    (f"What colour is bar {letters[at]}?", colours[at]),
                    ("What colour is the highest bar?", colours[high]),
                    ("How many bars are there?", str(size)),
                    ("What is the highest value?", str(values[high])),
                )
            )
        )
    )
    key = (which, at, *values)
    return _example(rng, "vision_chart", asked, answer, key, lambda r: bars(r, values, colours))


def parts(rng: random.Random) -> Example:
    """A pie chart: the largest or smallest part, or how many."""
    size = rng.randint(2, 5)
    colours = rng.sample(_NAMES, size)
    sizes = [1.6**n for n in range(size)]
    rng.shuffle(sizes)
    shares = [part / sum(sizes) for part in sizes]
    large, small = colours[sizes.index(max(sizes))], colours[sizes.index(min(sizes))]
    which, (asked, answer) = rng.choice(
        list(
            enumerate(
                (
                    ("Which colour has the largest part?", large),
                    ("What colour is the largest part?", large),
                    ("Which colour has the smallest part?", small),
                    ("How many parts are there?", str(size)),
                    ("How many parts does the pie have?", str(size)),
                )
            )
        )
    )
    key = (which, *colours, *(sizes.index(1.6**n) for n in range(size)))
    return _example(rng, "vision_pie", asked, answer, key, lambda r: pie(r, shares, colours))


GENERATORS: dict[str, Callable[[random.Random], Example]] = {
    "vision_shape": shape,
    "vision_colour": colour,
    "vision_count": count,
    "vision_place": place,
    "vision_relation": relation,
    "vision_exists": exists,
    "vision_describe": describe,
    "vision_number": number,
    "vision_read": read,
    "vision_sum": total,
    "vision_chart": chart,
    "vision_pie": parts,
}
CLASSES = tuple(GENERATORS)
WEIGHTS: dict[str, float] = {
    "vision_shape": 1.0,
    "vision_colour": 2.0,
    "vision_count": 3.0,
    "vision_place": 1.5,
    "vision_relation": 2.5,
    "vision_exists": 2.0,
    "vision_describe": 2.0,
    "vision_number": 3.0,
    "vision_read": 5.0,
    "vision_sum": 3.0,
    "vision_chart": 3.0,
    "vision_pie": 2.0,
}


def draw(name: str, rng: random.Random, split: str) -> Example:
    """One example of a class that belongs to a split."""
    while True:
        example = GENERATORS[name](rng)
        if belongs(example, split):
            return example


def drawn(rng: random.Random) -> Example:
    """One training example of any class."""
    [name] = rng.choices(CLASSES, [WEIGHTS[one] for one in CLASSES])
    return draw(name, rng, "train")


def evaluation_set(seed: int, per_class: int, split: str = "test") -> list[Example]:
    """The same number of held-out examples of every class."""
    found: list[Example] = []
    for name in CLASSES:
        rng = random.Random(f"{seed}:{split}:{name}")
        found += [draw(name, rng, split) for _ in range(per_class)]
    return found
