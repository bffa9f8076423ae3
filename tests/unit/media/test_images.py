"""Files of images that people and attackers send."""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sylvan.media.images import (
    MAX_SIDE,
    MAX_TILES,
    UnreadableError,
    decode_image,
    open_image,
)
from sylvan.media.messages import PrepareItem

LIMIT = 1 << 20


def saved(image, form="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(mode="RGB", size=(9, 5)):
    rng = np.random.default_rng(1)
    return Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8)).convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_modes_become_rgb(mode):
    deep = Image.fromarray(np.full((5, 9), 40_000, np.uint16))
    image = deep if mode == "I;16" else noise(mode)
    found = decode_image(saved(image), LIMIT)
    assert (found.mode, found.size) == ("RGB", (9, 5))


def test_cmyk_and_animations():
    assert decode_image(saved(noise("CMYK"), "JPEG"), LIMIT).mode == "RGB"
    frames = [noise(size=(4, 4)), Image.new("RGB", (4, 4))]
    moving = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(moving, LIMIT).size == (4, 4)


def test_transparency_is_white():
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert decode_image(saved(clear), LIMIT).getpixel((0, 0)) == (255, 255, 255)


def test_orientation_is_that_of_the_camera():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode_image(saved(noise(), "JPEG", exif=exif), LIMIT).size == (5, 9)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says that it is as large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(100_000, 100_000), (1, 2_000_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused_before_they_are_decoded(size):
    with pytest.raises(UnreadableError):
        decode_image(bomb(*size), LIMIT)


def test_the_limit_is_named():
    with pytest.raises(UnreadableError, match=r"media\.pixels"):
        decode_image(saved(Image.new("RGB", (100, 100))), 9_999)
    assert decode_image(saved(Image.new("RGB", (100, 100))), 10_000).size == (100, 100)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"GIF89a", b"<svg/>", saved(noise())[:40], b"\xff\xd8\xff"]
)
def test_what_is_no_image_is_refused(data):
    with pytest.raises(UnreadableError):
        decode_image(data, LIMIT)


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP"]),
    cut=st.integers(0, 400),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), max_size=4),
)
def test_damaged_files_are_read_or_refused(form, cut, flips):
    data = bytearray(saved(noise(), form))
    for place, bits in flips:
        data[place % len(data)] ^= bits
    data = bytes(data[: max(1, len(data) - cut)]) if cut % 2 else bytes(data)
    try:
        found = decode_image(data, LIMIT)
    except UnreadableError:
        return
    assert found.mode == "RGB"


def test_orders_scale_images_down():
    data = saved(noise(size=(90, 30)))

    def item(**options):
        return PrepareItem(id=1, kind="image", data=data, max_pixels=LIMIT, options=options)

    assert open_image(item()).size == (90, 30)
    assert open_image(item(**{MAX_SIDE: 30})).size == (30, 10)
    assert open_image(item(**{MAX_SIDE: 300})).size == (90, 30)
    with pytest.raises(UnreadableError, match="tiles"):
        open_image(item(**{MAX_TILES: 2}))
    assert open_image(item(**{MAX_TILES: 2}), tiles=True).size == (90, 30)


def test_a_missing_pillow_is_named(monkeypatch):
    data = saved(noise(size=(9, 9)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnreadableError, match=r"pillow; install sylvan\[multimodal\]"):
        decode_image(data, LIMIT)
