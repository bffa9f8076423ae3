"""Images of one size are prepared without transformers, to the same numbers."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sylvan.media.fixed_size import FixedSizeImages
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.train.vision.export import write_configs, write_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    write_configs(made)
    write_tokenizer(made)
    return made


def item(size: tuple[int, int], kind: str = "image") -> PrepareItem:
    pixels = np.random.default_rng(3).integers(0, 255, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return PrepareItem(id=4, kind=kind, data=file.getvalue(), max_pixels=1 << 20)


def test_numbers_and_tokens_equal_those_of_transformers(folder: Path) -> None:
    mine, theirs = FixedSizeImages.of(folder), Processor(folder)
    assert mine is not None
    for size in ((96, 96), (31, 200), (300, 17), (1, 1)):
        ours, reference = (one.prepare(item(size)) for one in (mine, theirs))
        assert ours.digest == reference.digest
        assert (ours.tokens, ours.placeholder) == (reference.tokens, reference.placeholder)
        np.testing.assert_array_equal(
            ours.features["pixel_values"], reference.features["pixel_values"]
        )


def test_other_kinds_and_damaged_files_are_refused(folder: Path) -> None:
    mine = FixedSizeImages.of(folder)
    assert mine is not None
    with pytest.raises(UnreadableError, match="takes images, no video"):
        mine.prepare(item((4, 4), "video"))
    with pytest.raises(UnreadableError, match="more than"):
        mine.prepare(item((1025, 1025)))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("preprocessor_config.json", {"do_center_crop": True}),
        ("preprocessor_config.json", {"size": {"shortest_edge": 96}}),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}),
        ("preprocessor_config.json", {"do_rescale": False}),
        ("processor_config.json", {"vision_feature_select_strategy": "default"}),
        ("processor_config.json", {"processor_class": "LlavaNextProcessor"}),
    ],
)
def test_processors_that_do_more_are_left_to_transformers(folder, tmp_path, file, change) -> None:
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        shutil.copy(folder / name, tmp_path)
    assert FixedSizeImages.of(tmp_path) is not None
    said = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(said | change))
    assert FixedSizeImages.of(tmp_path) is None
    (tmp_path / file).unlink()
    assert FixedSizeImages.of(tmp_path) is None
