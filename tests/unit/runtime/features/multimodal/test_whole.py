"""Slices where tokens of an item see each other: none cuts it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sylvan.protocol.media import MediaItem
from sylvan.runtime.features.multimodal.plan import MediaPrompt, row_ends

TOKEN = 99
IDS = np.array([1, 2, *[TOKEN] * 4, 3, *[TOKEN] * 3, 4, 5])  # runs 2 .. 6 and 7 .. 10


def prompt() -> MediaPrompt:
    items = [
        MediaItem(kind="image", start=a, stop=b, token_id=TOKEN, digest=b"d")
        for a, b in ((2, 6), (7, 10))
    ]
    return MediaPrompt(IDS, items, [b"a", b"b"], axes=False)


@pytest.mark.parametrize(
    ("start", "size", "most", "cut"),
    [
        (0, 2, 12, 2),
        (0, 3, 12, 6),  # on to the end of the image
        (0, 5, 5, 2),  # back to its beginning
        (2, 1, 3, 0),  # no room: another step
        (2, 1, 4, 4),
        (4, 1, 2, 2),  # the rest of an image whose start was cached
        (6, 2, 12, 4),
        (0, 12, 12, 12),
    ],
)
def test_slices_end_between_images(start, size, most, cut):
    assert prompt().cut(start, size, most) == cut


def test_rows_of_an_image_end_with_it():
    piece = SimpleNamespace(start=1, stop=11, draft=None)
    text = SimpleNamespace(start=3, stop=4, draft=None)
    batch = SimpleNamespace(slices=(text, piece))
    found = row_ends(batch, [None, prompt()])
    assert found.tolist() == [0, 2, 6, 6, 6, 6, 7, 10, 10, 10, 11]
    assert row_ends(batch, [None, None]) is None
    after = SimpleNamespace(slices=(SimpleNamespace(start=11, stop=12, draft=None),))
    assert row_ends(after, [prompt()]) is None
