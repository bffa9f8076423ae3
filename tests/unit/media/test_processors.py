"""The processors that checkpoints bring: as many tokens as the encoder makes vectors."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor, ProcessorError
from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder
from tests.support.media_files import wav
from tests.support.multimodal import FAMILIES, IMAGE, write_served
from tests.support.processors import PROCESSORS

ALWAYS = ("llava-next", "qwen2.5-vl")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS if name not in ALWAYS]


def image_item(height: int, width: int, **options) -> PrepareItem:
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return PrepareItem(
        id=7, kind="image", data=file.getvalue(), max_pixels=1 << 20, options=options
    )


@pytest.mark.parametrize("name", [*ALWAYS, *OTHERS])
def test_a_token_for_each_vector(name, tmp_path):
    write_served(name, tmp_path)
    processor, encoder = Processor(tmp_path), TransformersEncoder(tmp_path, torch.float32)
    items = [image_item(*size) for size in ((28, 28), (40, 60), (60, 20))]
    if FAMILIES[name].kind == "audio":
        items = [msgspec.structs.replace(items[0], kind="audio", data=wav(s)) for s in (0.4, 0.9)]
    for item in items:
        found = processor.prepare(item)
        with torch.inference_mode():
            [vectors, *_] = encoder.encode(item.kind, found.features)
        assert found.tokens.count(IMAGE) == len(vectors)
        assert found.placeholder >= IMAGE
        if found.grid is not None:
            assert np.prod(found.grid) == len(vectors)


RIBBONS = ("idefics3", "internvl", "llava-next", "llava-onevision", "ovis2", "qwen2.5-vl")
MAX_BYTES = 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", RIBBONS)
def test_ribbons_are_refused_or_take_little(name, tmp_path):
    """100,000 pixels are few; as one row they must not become many."""
    write_served(name, tmp_path)
    processor = Processor(tmp_path)
    for size in ((1, 100_000), (100_000, 1)):
        try:
            found = processor.prepare(image_item(*size))
        except UnreadableError:
            continue
        assert sum(array.nbytes for array in found.features.values()) <= MAX_BYTES


def test_tiles_can_be_chosen_where_they_are_counted(tmp_path):
    processor = Processor(write_served("internvl", tmp_path))
    many = processor.prepare(image_item(60, 120))
    few = processor.prepare(image_item(60, 120, max_tiles=1, min_tiles=1))
    assert len(few.features["pixel_values"]) < len(many.features["pixel_values"])
    assert few.tokens.count(IMAGE) < many.tokens.count(IMAGE)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return Processor(write_served("qwen2-vl", tmp_path_factory.mktemp("qwen")))


def test_digests_tell_items_apart(processor):
    same = processor.prepare(image_item(40, 60)).digest
    assert processor.prepare(image_item(40, 60)).digest == same
    assert processor.prepare(image_item(60, 40)).digest != same
    smaller = processor.prepare(image_item(40, 60, max_pixels=1024))
    assert smaller.digest != same
    assert len(smaller.tokens) < 40


def test_items_that_a_model_cannot_take_are_refused(processor):
    with pytest.raises(UnreadableError, match="no audio"):
        processor.prepare(PrepareItem(id=1, kind="audio", data=b"x", max_pixels=9))
    with pytest.raises(UnreadableError, match="refuses"):
        processor.prepare(image_item(1, 1000))  # too long for Qwen
    with pytest.raises(UnreadableError, match="tiles"):
        processor.prepare(image_item(40, 60, max_tiles=2))


def test_checkpoints_without_a_processor_say_so(tmp_path):
    folder = write_served("llava", tmp_path)
    (folder / "processor_config.json").unlink()
    images = folder / "preprocessor_config.json"
    images.write_text(images.read_text().replace("LlavaProcessor", "NobodysProcessor"))
    with pytest.raises(ProcessorError, match="NobodysProcessor"):
        Processor(folder)


@pytest.mark.slow
def test_a_thousand_images_leave_memory_as_it_was(processor):
    rng = np.random.default_rng(4)

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def look(count: int) -> None:
        for _ in range(count):
            height, width = (int(n) for n in rng.integers(28, 400, 2))
            processor.prepare(image_item(height, width))

    look(200)
    before = resident()
    look(1000)
    assert resident() - before < 16 << 20
