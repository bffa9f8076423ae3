"""Meaning of strings and parts in bodies, in the formats of all APIs."""

from __future__ import annotations

import base64

import pytest

from sylvan.api.media import (
    anthropic_media,
    native_media,
    openai_media,
    split_media,
    with_images,
)
from sylvan.media.source import MediaSource, read_source
from sylvan.protocol.errors import RequestError

DATA = b"\x89PNG"
TEXT = base64.b64encode(DATA).decode()


def test_addresses_data_urls_and_base64():
    assert read_source("image", TEXT, "p").data == DATA
    assert read_source("image", f"data:image/png;base64,{TEXT}", "p").data == DATA
    assert read_source("image", f"data:image/png;charset=x;base64,{TEXT}", "p").data == DATA
    assert read_source("image", "https://example.org/a.png", "p").url == "https://example.org/a.png"
    assert read_source("image", DATA, "p").data == DATA


@pytest.mark.parametrize(
    "given",
    [
        *("", None, 5, [], "data:", "data:image/png,AAAA", "data:;base64", "data:image/png;base64"),
        *("data:text/html;base64,AAAA", "data:video/mp4;base64,AAAA", "not base64!", "ftp://x/y"),
    ],
)
def test_anything_else_names_its_place(given):
    with pytest.raises(RequestError, match=r"^messages") as error:
        read_source("image", given, "messages[0].content[1].image_url.url")
    assert error.value.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": TEXT}},
        {"type": "image_url", "image_url": TEXT},
        {"type": "input_image", "image_url": f"data:image/jpeg;base64,{TEXT}"},
        {"type": "image", "image": TEXT},
        {"type": "image_url", "image_url": {"url": TEXT, "detail": "low"}},
    ],
)
def test_image_parts_of_openai(part):
    found = openai_media(part, "p")
    assert found["type"] == "image"
    assert found["source"].data == DATA
    low = isinstance(part.get("image_url"), dict) and part["image_url"].get("detail") == "low"
    assert ("max_pixels" in found["source"].options) == low


def test_numbers_of_an_image():
    url = {"url": TEXT, "max_long_side_pixel": 64, "max_dynamic_patch": 4, "min_dynamic_patch": 2}
    options = openai_media({"type": "image_url", "image_url": url}, "p")["source"].options
    assert options == {"max_side": 64, "max_tiles": 4, "min_tiles": 2}
    for name, value in (
        ("max_long_side_pixel", 0),
        ("max_long_side_pixel", 1 << 17),
        ("max_dynamic_patch", "4"),
        ("min_dynamic_patch", 5),
        ("detail", "ultra"),
        ("detail", 1),
    ):
        bad = url | {name: value}
        with pytest.raises(RequestError) as error:
            openai_media({"type": "image_url", "image_url": bad}, "p")
        assert error.value.param == f"p.image_url.{name}"


def test_sounds_and_videos_of_openai():
    sound = {"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}}
    assert openai_media(sound, "p")["source"].kind == "audio"
    video = {"type": "video_url", "video_url": {"url": TEXT}}
    assert openai_media(video, "p")["source"].kind == "video"


def test_images_of_anthropic_and_ollama():
    source = {"type": "base64", "media_type": "image/png", "data": TEXT}
    assert anthropic_media(source, "p")["source"].data == DATA
    assert anthropic_media({"type": "url", "url": "http://x/y"}, "p")["source"].url == "http://x/y"
    for bad in (None, {}, {"type": "file"}, {"type": "base64"}, {"type": "base64", "data": 5}):
        with pytest.raises(RequestError, match=r"^p"):
            anthropic_media(bad, "p")
    assert with_images("hi", [], "p") == "hi"
    parts = with_images("hi", [TEXT], "p")
    assert [part["type"] for part in parts] == ["image", "text"]


def test_native_items_of_one_prompt_and_of_batches():
    def of(given, size=1, *, is_batch=False):
        found = native_media("image", given, "image_data", size, is_batch=is_batch)
        return [[item.path for item in items] for items in found]

    assert of(None) == [[]]
    assert of(TEXT) == [["image_data"]]
    assert of([TEXT, {"url": TEXT}]) == [["image_data[0]", "image_data[1]"]]
    assert of([TEXT, None, [TEXT, TEXT]], 3, is_batch=True) == [
        ["image_data[0]"],
        [],
        ["image_data[2]", "image_data[2]"],
    ]
    with pytest.raises(RequestError, match="3 prompts"):
        of([TEXT], 3, is_batch=True)


def test_sources_leave_messages_in_their_order():
    first, second = MediaSource("image", "a", b"1"), MediaSource("image", "b", b"2")
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "image", "source": first}, {"type": "text"}]},
        {"role": "user", "content": [{"type": "text"}, {"type": "image", "source": second}]},
    ]
    plain, sources = split_media(messages)
    assert sources == [first, second]
    assert plain[1]["content"] == [{"type": "image"}, {"type": "text"}]
    assert messages[1]["content"][0]["source"] is first  # what was given stays as it was
