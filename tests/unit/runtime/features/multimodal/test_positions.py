"""Rotary positions with three axes, as the published code of Qwen gives them."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.media import MediaItem, media_tokens
from sylvan.runtime.features.multimodal.positions import prompt_positions

TOKEN = 99


def item(ids, grid, step=1.0, kind="video") -> MediaItem:
    places = np.flatnonzero(ids == TOKEN)
    return MediaItem(
        kind=kind,
        start=int(places[0]),
        stop=int(places[-1]) + 1,
        token_id=TOKEN,
        digest=b"d",
        grid=grid,
        time_step=step,
    )


def test_time_continues_by_the_step_rounded_down():
    ids = np.array([1, 2, *[TOKEN] * 12, 3, 4])
    found = prompt_positions(ids, [item(ids, (3, 2, 2), 1.5)])
    assert found.axes[0].tolist() == [0, 1, *[2] * 4, *[3] * 4, *[5] * 4, 6, 7]
    assert found.axes[1].tolist() == [0, 1, *[2, 2, 3, 3] * 3, 6, 7]
    assert found.axes[2].tolist() == [0, 1, *[2, 3, 2, 3] * 3, 6, 7]
    assert found.shift == 7 - 15
    assert found.last == 14


def test_text_between_times_divides_a_video():
    ids = np.array([1, *[TOKEN] * 4, 2, 3, *[TOKEN] * 4, 4])
    found = prompt_positions(ids, [item(ids, (2, 2, 2))])
    assert found.axes[0].tolist() == [0, 1, 1, 1, 1, 3, 4, 5, 5, 5, 5, 7]
    assert found.axes[1].tolist() == [0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7]
    assert found.axes[2].tolist() == [0, 1, 2, 1, 2, 3, 4, 5, 6, 5, 6, 7]


def test_tokens_are_counted_by_kind():
    ids = np.array([1, TOKEN, TOKEN, 2])
    assert media_tokens(ids, [item(ids, None), item(ids, None, kind="image")]) == {
        "video": 2,
        "image": 2,
    }
