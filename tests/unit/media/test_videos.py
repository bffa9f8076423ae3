"""How many frames of a video are looked at, how large, and in which patches."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.media.container import VideoFacts
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor
from sylvan.media.videos import VideoRules, patches_of
from tests.support.media_files import mp4
from tests.support.multimodal import VIDEO
from tests.support.processors import PROCESSORS, write_files

RULES = VideoRules(
    whole=False,
    least=128 * 28 * 28,
    most=768 * 28 * 28,
    max_tokens=128_000,
    fps=2.0,
    min_frames=4,
    max_frames=768,
    patch=14,
    merge=2,
    depth=2,
    tokens_per_second=0.0,
)
WHOLE = VideoRules(
    whole=True,
    least=128 * 32 * 32,
    most=32 * 32 * 768,
    max_tokens=768,
    fps=2.0,
    min_frames=4,
    max_frames=768,
    patch=16,
    merge=2,
    depth=2,
    tokens_per_second=0.0,
)


def item(**options) -> PrepareItem:
    return PrepareItem(id=1, kind="video", data=b"", max_pixels=1 << 22, options=options)


def test_frames_are_even_in_number_and_at_even_distances():
    facts = VideoFacts(100, 25.0, 640, 480)  # 4 s
    assert RULES.chosen(facts, item()) == [0, 14, 28, 42, 57, 71, 85, 99]
    assert len(RULES.chosen(facts, item(fps=1))) == 4
    assert len(RULES.chosen(facts, item(max_frames=3))) == 2
    assert RULES.chosen(VideoFacts(1, 25.0, 640, 480), item()) == [0]
    assert len(RULES.chosen(VideoFacts(10**6, 25.0, 640, 480), item())) == 768


@pytest.mark.parametrize(
    ("rules", "width", "height", "count", "size"),
    [
        # by hand, from the formulas of qwen-vl-utils
        (RULES, 1280, 720, 8, (560, 1008)),
        (RULES, 64, 48, 8, (280, 392)),
        (RULES, 640, 480, 768, (420, 560)),
        (WHOLE, 1280, 720, 4, (320, 576)),
    ],
)
def test_sizes_are_those_of_the_reference(rules, width, height, count, size):
    assert rules.size(VideoFacts(count, 2.0, width, height), count) == size


def test_ribbons_are_refused():
    with pytest.raises(UnreadableError, match="200 times"):
        RULES.size(VideoFacts(8, 2.0, 6000, 20), 8)


@pytest.fixture(scope="module", params=["qwen2-vl", "qwen3-vl"])
def processor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_files(PROCESSORS[request.param], folder)
    return Processor(folder)


def test_patches_hold_the_frames(processor):
    from PIL import Image

    rng = np.random.default_rng(2)
    frames = [Image.fromarray(rng.integers(0, 255, (16, 24, 3), np.uint8)) for _ in range(4)]
    rules, images = processor._videos, processor._images
    patches, (times, height, width) = patches_of(frames, rules, images)
    assert (times, height, width) == (2, 4, 6)
    # back to pixels: times, blocks of merged patches, patches of a block, channels, depth, sides
    whole = patches.reshape(times, 2, 3, 2, 2, 3, 2, 4, 4)
    pixels = whole.transpose(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(4, 3, 16, 24)
    mean, deviation = (
        np.array(values, np.float32)[:, None, None]
        for values in (images.image_mean, images.image_std)
    )
    for frame, found in zip(frames, pixels, strict=True):
        expected = np.asarray(frame, np.float32).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(found, (expected - mean) / deviation, atol=1e-5)


def test_a_video_has_a_token_for_each_vector(processor):
    made = processor.prepare(PrepareItem(id=1, kind="video", data=mp4(12, 6), max_pixels=1 << 20))
    assert made.tokens.count(VIDEO) == np.prod(made.grid)
    assert made.placeholder == VIDEO
    times, height, width = made.features["video_grid_thw"][0].tolist()
    assert made.grid == (times, height // 2, width // 2)
    assert len(made.features["pixel_values_videos"]) == times * height * width
    assert (made.around is not None) == (made.tokens[0] != VIDEO)
