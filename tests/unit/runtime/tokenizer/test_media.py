"""Items of prompts are prepared once for a tenant, and again for another."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from sylvan.config.media import MediaConfig
from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError
from sylvan.runtime.tokenizer.media import MediaPreparer
from tools.train.vision.export import write_configs, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llava")
    write_configs(made)
    write_tokenizer(made)
    return made


def source(seed: int = 0) -> MediaSource:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 60, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return MediaSource("image", "image_data", file.getvalue())


async def test_tenants_share_no_prepared_items(folder):
    raw = json.loads((folder / "config.json").read_text())
    token = raw.get("image_token_index", raw.get("image_token_id"))
    preparer = MediaPreparer(folder, MediaConfig())
    try:

        async def features(tenant):
            ids, [item] = await preparer.expand([5, token, 6], [source()], {"image": token}, tenant)
            assert len(ids) == 2 + item.stop - item.start
            return item.digest, item.features["pixel_values"]

        digest, mine = await features("acme")
        _, again = await features("acme")
        same, others = await features("bravo")
        assert again is mine  # kept
        assert others is not mine
        assert same == digest
        np.testing.assert_array_equal(others, mine)
        with pytest.raises(RequestError, match="placeholders"):
            await preparer.expand([token] * 2, [source()], {"image": token}, "acme")
    finally:
        await preparer.close()
