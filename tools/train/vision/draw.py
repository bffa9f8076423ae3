"""Draws pictures: shapes, texts and charts, with Pillow."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]

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

_SIZES = (96, 96, 112, 128, 160, 224)


def shade(rng: random.Random, name: str) -> Colour:
    """A colour of this name."""
    if rng.random() < 0.3:
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
    width = round(height * rng.choice((1, 1, 1, 1.33, 1.6, 2) if wide else (1, 1, 1, 1, 1.33, 0.8)))
    ground = (255, 255, 255)
    if rng.random() < 0.3:
        ground = tuple(rng.randint(225, 255) for _ in range(3))
    return Image.new("RGB", (width, height), ground)


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
    reach = (radius + other.radius) * 1.15
    return abs(x - other.x) > reach or abs(y - other.y) > reach


def scene(rng: random.Random, things: Sequence[Thing]) -> Image.Image:
    """A picture of shapes."""
    image = canvas(rng)
    pen = ImageDraw.Draw(image)
    width, height = image.size
    for thing in things:
        radius = thing.radius * min(width, height)
        x, y = (
            radius + (at - thing.radius) / (1 - 2 * thing.radius) * (side - 2 * radius)
            for at, side in ((thing.x, width), (thing.y, height))
        )
        _shape(pen, thing.shape, (x, y, radius), shade(rng, thing.colour), rng.uniform(-0.15, 0.15))
    return image


def _shape(
    pen: Any, shape: str, where: tuple[float, float, float], fill: Colour, turn: float
) -> None:
    x, y, radius = where
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return
    if shape == "square":
        half = radius * 0.85
        pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
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
    pen.polygon(points, fill=fill)


@functools.lru_cache(maxsize=256)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def written(rng: random.Random, text: str) -> Image.Image:
    """A picture of one line of text, as large as there is room, or smaller."""
    image = canvas(rng, wide=len(text) > 2)
    pen = ImageDraw.Draw(image)
    width, height = image.size
    probe = _font(40)
    left, top, right, bottom = probe.getbbox(text)
    fits = min(width * 0.92 / (right - left), height * 0.8 / (bottom - top)) * 40
    least = max(9.0 * height / 96, fits * 0.55)
    size = max(8, int(min(rng.uniform(least, max(least, fits)), fits, height * 0.6)))
    font = _font(size)
    bold = rng.random() < 0.25 and size > 16
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font, stroke_width=int(bold))
    x = rng.uniform(0, max(1, width - (right - left))) - left
    y = rng.uniform(0, max(1, height - (bottom - top))) - top
    if rng.random() < 0.3:
        x = (width - (right - left)) / 2 - left
        y = (height - (bottom - top)) / 2 - top
    ink = (0, 0, 0) if rng.random() < 0.5 else shade(rng, rng.choice(("black", "blue", "red")))
    pen.text((x, y), text, font=font, fill=ink, stroke_width=int(bold), stroke_fill=ink)
    return image


def bars(rng: random.Random, values: Sequence[int], colours: Sequence[str]) -> Image.Image:
    """A bar chart: letters below the bars, their values above."""
    size = rng.choice((96, 128, 192))
    image = Image.new("RGB", (round(size * rng.choice((1, 1, 1.33))), size), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    width, height = image.size
    font = _font(round(size * 0.125))
    base, room = height * 0.84, height * 0.66
    step = width / len(values)
    for index, (value, colour) in enumerate(zip(values, colours, strict=True)):
        middle = (index + 0.5) * step
        top = base - room * value / 9
        half = step * 0.3
        pen.rectangle((middle - half, top, middle + half, base), fill=shade(rng, colour))
        pen.text((middle, base + 1), "ABCDE"[index], font=font, fill=(0, 0, 0), anchor="mt")
        pen.text((middle, top - 1), str(value), font=font, fill=(0, 0, 0), anchor="mb")
    pen.line((0, base, width, base), fill=(0, 0, 0), width=max(1, size // 96))
    return image


def pie(rng: random.Random, shares: Sequence[float], colours: Sequence[str]) -> Image.Image:
    """A pie chart of parts that add up to one."""
    image = canvas(rng)
    pen = ImageDraw.Draw(image)
    width, height = image.size
    radius = min(width, height) * rng.uniform(0.32, 0.48)
    box: Box = (
        width / 2 - radius,
        height / 2 - radius,
        width / 2 + radius,
        height / 2 + radius,
    )
    angle = rng.uniform(0, 360)
    for share, colour in zip(shares, colours, strict=True):
        pen.pieslice(box, angle, angle + 360 * share, fill=shade(rng, colour))
        angle += 360 * share
    return image
