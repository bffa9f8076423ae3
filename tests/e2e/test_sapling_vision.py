"""The built-in model that sees, asked about pictures drawn here."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.e2e.conftest import running

PICTURE_TOKENS = 64


@pytest.fixture(scope="module")
def http():
    with (
        running("sapling-vision") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(http, text: str, picture: Image.Image | None = None) -> tuple[str, dict]:
    content: object = text
    if picture is not None:
        url = {"url": data_url(picture)}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
    body = {"model": "sapling-vision", "messages": [{"role": "user", "content": content}]}
    reply = http.post("/v1/chat/completions", json=body | {"max_tokens": 32, "temperature": 0})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    return answer["choices"][0]["message"]["content"], answer["usage"]


def blank(width: int = 200, height: int = 200) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (width, height), "white")
    return picture, ImageDraw.Draw(picture)


def test_it_names_a_colour_and_counts_its_tokens(http):
    picture, pen = blank()
    pen.ellipse((50, 60, 130, 140), fill="red")
    answer, usage = ask(http, "What colour is the circle?", picture)
    assert answer == "red"
    assert usage["prompt_tokens_details"]["image_tokens"] == PICTURE_TOKENS
    _, unseen = ask(http, "What colour is the circle?")
    assert usage["prompt_tokens"] == unseen["prompt_tokens"] + PICTURE_TOKENS


def test_it_describes_two_shapes(http):
    picture, pen = blank()
    pen.ellipse((20, 40, 90, 110), fill="red")
    pen.rectangle((120, 110, 180, 170), fill="blue")
    assert ask(http, "What do you see?", picture)[0] == "a red circle and a blue square"


def test_it_reads_a_number(http):
    picture, pen = blank(180, 120)
    pen.text((40, 20), "47", font=ImageFont.load_default(80), fill="black")
    assert ask(http, "Which number is this?", picture)[0] == "47"


def test_it_talks_without_a_picture(http):
    assert "sapling" in ask(http, "Who are you?")[0].lower()
