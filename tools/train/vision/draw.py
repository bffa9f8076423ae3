"""Draws pictures with Pillow, and says what stands where: shapes, texts and bar charts."""

from __future__ import annotations

import functools
import io
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
COLOURS: Mapping[str, Sequence[Colour]] = {
    "red": ((255, 0, 0), (200, 25, 35), (230, 60, 50)),
    "green": ((0, 128, 0), (0, 220, 0), (50, 160, 70)),
    "blue": ((0, 0, 255), (30, 90, 220), (20, 30, 150)),
    "yellow": ((255, 255, 0), (250, 215, 20), (240, 225, 60)),
    "orange": ((255, 165, 0), (250, 125, 10), (240, 145, 40)),
    "purple": ((128, 0, 128), (110, 40, 170), (150, 60, 200)),
    "black": ((0, 0, 0), (35, 35, 35), (15, 20, 25)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 150, 190)),
    "brown": ((165, 42, 42), (120, 72, 30), (139, 69, 19)),
    "grey": ((128, 128, 128), (150, 150, 155), (105, 105, 105)),
}
"""Names, and three colours of each, between which all its shades lie."""
BAR = "bar"
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
ORDERS = ("first", "second", "third", "fourth", "fifth")
LAST = "last"
HIGHEST, LOWEST = "highest", "lowest"

BUILT_IN_FONT = ""
"""Pillow's own font."""
_TRAINED_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif"),
    *("LiberationSans-Regular", "LiberationSans-Bold", "LiberationSerif-Regular"),
)
_HELD_OUT_FONTS = (
    *("DejaVuSansCondensed", "DejaVuSerif-Bold", "LiberationMono-Regular"),
    *("LiberationSans-Italic", "LiberationSansNarrow-Regular", "LiberationSerif-Bold"),
)
_FONT_FOLDER = Path("/usr/share/fonts/truetype")
_SIZES = (96, 96, 128, 128, 160, 200, 256)


def installed_fonts(*, held_out: bool = False) -> tuple[str, ...]:
    """Fonts of this machine, of those trained on or of those never trained on.

    Pillow's own one is always there, and one that is trained on.
    """
    names = _HELD_OUT_FONTS if held_out else _TRAINED_FONTS
    found = (next(_FONT_FOLDER.rglob(f"{name}.ttf"), None) for name in names)
    own = () if held_out else (BUILT_IN_FONT,)
    return own + tuple(str(path) for path in found if path)


@dataclass(frozen=True)
class Mark:
    """A shape, a character or a bar; its centre in parts of width and height.

    `more` are words for what else is known of it: its place, its order, or what its bar shows.
    """

    name: str
    x: float
    y: float
    colour: str = ""
    more: tuple[str, ...] = ()


@dataclass
class Drawn:
    """A picture, the marks on it, and how many shapes, characters or bars it shows, if few."""

    image: Image.Image
    marks: list[Mark] = field(default_factory=list)
    count: int | None = None


def shade(rng: random.Random, name: str) -> Colour:
    """A colour of this name."""
    if rng.random() < 0.4:
        return COLOURS[name][0]
    parts = [rng.random() for _ in range(3)]
    total = sum(parts)
    mixed = (
        sum(p * c[i] for p, c in zip(parts, COLOURS[name], strict=True)) / total for i in range(3)
    )
    red, green, blue = (max(0, min(255, round(value) + rng.randint(-6, 6))) for value in mixed)
    return red, green, blue


def canvas(rng: random.Random, *, wide: bool = False) -> Image.Image:
    """An empty picture: white, or a light tint."""
    height = rng.choice(_SIZES)
    sides = (1, 1, 1.33, 1.6, 2, 3) if wide else (1, 1, 1, 1, 1.33, 1.6, 0.8)
    ground = (255, 255, 255)
    if rng.random() < 0.3:
        ground = tuple(rng.randint(225, 255) for _ in range(3))
    return Image.new("RGB", (round(height * rng.choice(sides)), height), ground)


def worn(rng: random.Random, drawn: Drawn) -> Drawn:
    """The picture, one time in five as a JPEG file keeps it."""
    if rng.random() < 0.2:
        file = io.BytesIO()
        drawn.image.save(file, "JPEG", quality=rng.randint(50, 95))
        drawn.image = Image.open(file).convert("RGB")
    return drawn


@dataclass(frozen=True)
class Thing:
    """A shape on the canvas; centre and radius are parts of the shorter side."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


def scattered(
    rng: random.Random, pairs: Sequence[tuple[str, str]], radius: tuple[float, float]
) -> list[Thing]:
    """Shapes of these kinds and colours at random places where they do not touch."""
    while True:
        things: list[Thing] = []
        for shape, colour in pairs:
            for _ in range(40):
                size = rng.uniform(*radius)
                x, y = rng.uniform(size, 1 - size), rng.uniform(size, 1 - size)
                if all(_apart(x, y, size, other) for other in things):
                    things.append(Thing(shape, colour, x, y, size))
                    break
        if len(things) == len(pairs):
            return things
        radius = radius[0] * 0.9, radius[1] * 0.9


def _apart(x: float, y: float, radius: float, other: Thing) -> bool:
    reach = (radius + other.radius) * 1.12
    return abs(x - other.x) > reach or abs(y - other.y) > reach


def scene(rng: random.Random, things: Sequence[Thing]) -> Drawn:
    """A picture of shapes; of two, the left one is the first."""
    drawn = Drawn(canvas(rng), count=len(things))
    pen = ImageDraw.Draw(drawn.image)
    width, height = drawn.image.size
    outlined = rng.random() < 0.1
    for thing in things:
        radius = thing.radius * min(width, height)
        x, y = (
            radius + (at - thing.radius) / (1 - 2 * thing.radius) * (side - 2 * radius)
            for at, side in ((thing.x, width), (thing.y, height))
        )
        line = (0, 0, 0) if outlined else None
        fill = shade(rng, thing.colour), line
        _shape(pen, thing.shape, (x, y, radius), fill, rng.uniform(-0.15, 0.15))
        place = ROWS[int(3 * y / height)], COLUMNS[int(3 * x / width)]
        drawn.marks.append(Mark(thing.shape, x / width, y / height, thing.colour, place))
    if len(things) == 2:
        ordered = sorted(drawn.marks, key=lambda one: one.x)
        drawn.marks = [
            replace(one, more=(*one.more, order))
            for one, order in zip(ordered, ORDERS, strict=False)
        ]
    return worn(rng, drawn)


def _shape(
    pen: Any,
    shape: str,
    where: tuple[float, float, float],
    paint: tuple[Colour, Colour | None],
    turn: float,
) -> None:
    x, y, radius = where
    fill, line = paint
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill, outline=line)
        return
    if shape == "square":
        half = radius * 0.85
        pen.rectangle((x - half, y - half, x + half, y + half), fill=fill, outline=line)
        return
    if shape == "cross":
        arm = radius * 0.32
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
        return
    corners = {"triangle": 3, "diamond": 4, "star": 10}[shape]
    points: list[tuple[float, float]] = []
    turn = 0.0 if shape == "diamond" else turn
    for corner in range(corners):
        reach = radius * (0.42 if shape == "star" and corner % 2 else 1.0)
        angle = turn - math.pi / 2 + corner * 2 * math.pi / corners
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    pen.polygon(points, fill=fill, outline=line)


@functools.lru_cache(maxsize=1024)
def _font(name: str, size: int) -> Any:
    return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)


def _line(pen: Any, at: tuple[float, float], text: str, font: Any, ink: Colour) -> list[Mark]:
    """Write a line; its characters in order, with centres in pixels."""
    pen.text(at, text, font=font, fill=ink)
    _, top, _, bottom = pen.textbbox(at, text, font=font)
    ends = [at[0] + font.getlength(text[:end]) for end in range(len(text) + 1)]
    return [
        Mark(
            one,
            (ends[i] + ends[i + 1]) / 2,
            (top + bottom) / 2,
            more=(*ORDERS[i : i + 1], *((LAST,) if i == len(text) - 1 else ())),
        )
        for i, one in enumerate(text)
        if one != " "
    ]


def _scaled(marks: Sequence[Mark], image: Image.Image) -> list[Mark]:
    width, height = image.size
    return [replace(one, x=one.x / width, y=one.y / height) for one in marks]


def _ink(rng: random.Random) -> Colour:
    return (0, 0, 0) if rng.random() < 0.6 else shade(rng, rng.choice(("black", "blue", "red")))


def written(rng: random.Random, text: str, fonts: Sequence[str]) -> Drawn:
    """A picture of one line of text, as large as there is room, or smaller."""
    drawn = Drawn(canvas(rng, wide=len(text) > 2), count=len(text))
    pen = ImageDraw.Draw(drawn.image)
    width, height = drawn.image.size
    name = rng.choice(fonts)
    left, top, right, bottom = _font(name, 40).getbbox(text)
    fits = min(width * 0.92 / (right - left), height * 0.8 / (bottom - top)) * 40
    least = max(12.0 * height / 96, fits * 0.65)
    size = max(8, int(min(rng.uniform(least, max(least, fits)), fits, height * 0.6)))
    font = _font(name, size)
    left, top, right, bottom = font.getbbox(text)
    free = max(0, width - (right - left)), max(0, height - (bottom - top))
    centred = rng.random() < 0.4
    x, y = (side * (0.5 if centred else rng.random()) for side in free)
    drawn.marks = _scaled(_line(pen, (x - left, y - top), text, font, _ink(rng)), drawn.image)
    return worn(rng, drawn)


def page(rng: random.Random, texts: Sequence[str], fonts: Sequence[str]) -> Drawn:
    """A picture of several lines, to learn characters from."""
    drawn = Drawn(canvas(rng))
    pen = ImageDraw.Draw(drawn.image)
    width, height = drawn.image.size
    y = rng.uniform(0, 0.1) * height
    for text in texts:
        name = rng.choice(fonts)
        left, top, right, bottom = _font(name, 40).getbbox(text)
        most = min(0.95 * width / (right - left), 0.34 * height / (bottom - top)) * 40
        font = _font(name, max(8, int(most * rng.uniform(0.75, 1))))
        left, top, right, bottom = font.getbbox(text)
        if y + bottom - top > height:
            break
        x = rng.random() * max(0, width - (right - left))
        marks = _line(pen, (x - left, y - top), text, font, _ink(rng))
        drawn.marks += _scaled(marks, drawn.image)
        y += (bottom - top) + rng.uniform(0.02, 0.1) * height
    return worn(rng, drawn)


def bars(
    rng: random.Random, values: Sequence[int], colours: Sequence[str], fonts: Sequence[str]
) -> Drawn:
    """A bar chart: letters below the bars, their values above.

    A letter knows what its bar shows, and whether it is the highest or the lowest.
    """
    size = rng.choice((96, 128, 192))
    image = Image.new("RGB", (round(size * rng.choice((1, 1, 1.33))), size), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    width, height = image.size
    font = _font(rng.choice(fonts), round(size * rng.uniform(0.12, 0.15)))
    base, room = height * 0.84, height * 0.66
    step = width / len(values)
    marks: list[Mark] = []
    for index, (value, colour) in enumerate(zip(values, colours, strict=True)):
        middle = (index + 0.5) * step
        top = base - room * value / 9
        half = step * 0.3
        letter, digit = "ABCDE"[index], str(value)
        pen.rectangle((middle - half, top, middle + half, base), fill=shade(rng, colour))
        pen.text((middle, base + 1), letter, font=font, fill=(0, 0, 0), anchor="mt")
        pen.text((middle, top - 1), digit, font=font, fill=(0, 0, 0), anchor="mb")
        marks.append(Mark(BAR, middle, base - 0.03 * height, colour))
        ranks = [name for name, of in ((HIGHEST, max), (LOWEST, min)) if value == of(values)]
        known = (digit, colour, *ranks)
        marks.append(Mark(letter, middle, base + 0.06 * height, more=known))
        marks.append(Mark(digit, middle, top - 0.06 * height))
    pen.line((0, base, width, base), fill=(0, 0, 0), width=max(1, size // 96))
    return worn(rng, Drawn(image, _scaled(marks, image), len(values)))
