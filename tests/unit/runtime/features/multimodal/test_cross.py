"""Which images a row of Llama 3.2 Vision attends to."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from sylvan.protocol.media import MediaItem
from sylvan.runtime.features.multimodal.plan import MediaPrompt

TOKEN = 300


def prompt(ids) -> MediaPrompt:
    places = [at for at, token in enumerate(ids) if token == TOKEN]
    media = [
        MediaItem(
            kind="image", start=at, stop=at + 1, token_id=TOKEN, digest=b"%d" % n, features={}
        )
        for n, at in enumerate(places)
    ]
    keys = [item.digest for item in media]
    return MediaPrompt(np.array(ids, np.int32), media, keys, axes=False)


@pytest.mark.parametrize("seed", range(20))
def test_rows_attend_to_what_the_published_processor_says(seed):
    rng = np.random.default_rng(seed)
    ids = [TOKEN if rng.random() < 0.35 else 7 for _ in range(14)]
    if TOKEN not in ids:
        ids[5] = TOKEN
    generated = 3  # what comes later sees what the last token sees
    total = len(ids) + generated
    seen = [set() for _ in range(total)]
    for number, (start, stop) in enumerate(get_cross_attention_token_mask(ids, TOKEN)):
        for row in range(start, total if stop in (-1, len(ids)) else stop):
            seen[row].add(b"%d" % number)

    made, start = [set() for _ in range(total)], 0
    while start < total:  # in slices, at any row of a step
        count = int(rng.integers(1, 6))
        count = min(count, total - start)
        for part in prompt(ids).cross(start, count, 100):
            for row in range(part.row, part.row + part.count):
                assert not made[start + row - 100]
                made[start + row - 100] = set(part.keys)
        start += count

    assert made == seen


def test_text_before_images_attends_to_nothing():
    assert [*prompt([7, 7, TOKEN, 7]).cross(0, 2, 0)] == []
