"""The built-in model that sees: real weights, real pictures, no download and no transformers."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.e2e.conftest import running

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with running("sapling-vision") as made, httpx.Client(base_url=made.url, timeout=180) as http:
        yield http


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(http: httpx.Client, image: Image.Image, question: str, **more: object) -> str:
    content = [
        {"type": "image_url", "image_url": {"url": url(image)}},
        {"type": "text", "text": question},
    ]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 40}
    reply = http.post("/v1/chat/completions", json=body | more)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def disc(colour: str, side: int = 160) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    ImageDraw.Draw(image).ellipse((side * 0.25, side * 0.25, side * 0.75, side * 0.75), fill=colour)
    return image


def text(said: str) -> Image.Image:
    image = Image.new("RGB", (128, 128), "white")
    font = ImageFont.load_default(40)
    ImageDraw.Draw(image).text((64, 64), said, font=font, fill="black", anchor="mm")
    return image


def test_pictures_are_told_apart(server):
    for colour in ("red", "green", "blue", "yellow", "black"):
        assert ask(server, disc(colour), "What colour is the circle?") == colour
    assert ask(server, disc("red"), "What shape is this?") == "circle"
    for number in ("7", "42", "318"):
        assert ask(server, text(number), "Which number is this?") == number
