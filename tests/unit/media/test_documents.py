"""Pages of PDF documents."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from sylvan.media.documents import PAGES, draw_pages
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem

pytest.importorskip("pypdfium2")


def document(*colours: str, size: tuple[int, int] = (60, 40)) -> bytes:
    first, *others = (Image.new("RGB", size, colour) for colour in colours)
    file = io.BytesIO()
    first.save(file, "PDF", save_all=True, append_images=others)
    return file.getvalue()


def item(data: bytes, most: int = 4, max_pixels: int = 10_000) -> PrepareItem:
    return PrepareItem(id=3, kind="image", data=data, max_pixels=max_pixels, options={PAGES: most})


def test_pages_are_drawn_in_order_and_within_the_limit_of_pixels():
    found = draw_pages(item(document("red", "blue", "lime")))
    assert list(found.features) == ["0", "1", "2"]
    colours = []
    for page in found.features.values():
        image = Image.open(io.BytesIO(page.tobytes()))
        width, height = image.size
        assert 5_000 < width * height <= 10_200
        assert width / height == pytest.approx(1.5, rel=0.05)
        colours.append(image.getpixel((width // 2, height // 2)))
    assert [max(range(3), key=colour.__getitem__) for colour in colours] == [0, 2, 1]


def test_bad_documents_are_refused():
    whole = document("red", "blue")
    for data, words in (
        (b"", "cannot be read"),
        (b"%PDF-1.7\n" + b"x" * 100, "cannot be read"),
        (Image.new("RGB", (3, 3)).tobytes(), "cannot be read"),
    ):
        with pytest.raises(UnreadableError, match=words):
            draw_pages(item(data))
    with pytest.raises(UnreadableError, match=r"2 pages, 1 may be sent \(media.items\)"):
        draw_pages(item(whole, 1))
    damaged = whole[: len(whole) // 2]
    try:
        draw_pages(item(damaged))  # PDFium repairs what it can
    except UnreadableError as error:
        assert "cannot be read" in str(error) or "pages" in str(error)  # noqa: PT017
