"""Images for Phi-3-Vision, MiniCPM-V, Kimi-VL and DeepSeek-VL2 are cut as in their own code."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem
from sylvan.media.published import COUNT, NUMBER, PublishedImages, is_counted
from sylvan.media.resize import bicubic
from tests.support.scripted import write_checkpoint

NAMES = ("<image>", "</image>", "<unk>", "<|image|>", "<slice>", "</slice>", "<|media_pad|>")
NAMES += ("<image_id>", "</image_id>", "<img>", "</img>", "<IMG_CONTEXT>")
CONFIGS = {
    "phi": {"architectures": ["Phi3VForCausalLM"]},
    "kimi": {
        "architectures": ["KimiVLForConditionalGeneration"],
        "media_placeholder_token_id": 269,
        "vision_config": {"patch_size": 14},
    },
    "deepseek": {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": [[56, 56], [56, 112], [112, 56], [168, 56]],
        "vision_config": {"patch_size": 14},
    },
    "internvl": {
        "architectures": ["InternVLChatModel"],
        "force_image_size": 28,
        "max_dynamic_patch": 6,
        "use_thumbnail": True,
        "vision_config": {"image_size": 28, "patch_size": 7},
    },
    "minicpm": {"architectures": ["MiniCPMV"], "version": 2.6, "query_num": 3},
}
RULES = {"phi": {"num_crops": 4}, "kimi": {"in_token_limit": 64}}


@pytest.fixture(params=CONFIGS)
def kind(request):
    return request.param


@pytest.fixture
def made(kind, tmp_path):
    return write(kind, tmp_path)


def write(kind, folder) -> PublishedImages:
    write_checkpoint(folder)
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in NAMES])
    backend.save(str(path))
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    (folder / "preprocessor_config.json").write_text(json.dumps(RULES.get(kind, {})))
    found = PublishedImages.of(folder)
    assert found is not None
    assert is_counted(folder) == (kind in ("deepseek", "minicpm"))
    return found


def picture(width, height, seed=0) -> Image.Image:
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return Image.fromarray(rough).resize((width, height))


def item(image, **options) -> PrepareItem:
    file = io.BytesIO()
    image.save(file, "PNG")
    return PrepareItem(
        id=1, kind="image", data=file.getvalue(), max_pixels=1 << 24, options=options
    )


@pytest.mark.parametrize("size", [(5, 7, 9, 4), (9, 4, 3, 8), (6, 6, 6, 6)])
def test_cubics_equal_pytorch(size):
    height, width, down, across = size
    x = np.random.default_rng(1).normal(size=(3, height, width)).astype(np.float32)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(x)[None], size=(down, across), mode="bicubic", align_corners=False
    )[0].numpy()
    np.testing.assert_allclose(bicubic(x, down, across), expected, atol=1e-5)


SIZES = [(300, 200), (200, 640), (1000, 90), (64, 64), (7, 13)]


@pytest.mark.parametrize("size", SIZES)
def test_phi_sees_tiles_and_the_whole(tmp_path, size):
    made = write("phi", tmp_path).prepare(item(picture(*size)))
    width, height = size
    turn = width < height
    width, height = (height, width) if turn else (width, height)
    ratio, scale = width / height, 1
    while scale * np.ceil(scale / ratio) <= 4:
        scale += 1
    columns = scale - 1
    rows = int(np.ceil(int(columns * 336 / ratio) / 336))
    rows, columns = (columns, rows) if turn else (rows, columns)
    pixels = made.features["pixel_values"]
    assert pixels.shape == (1, 1 + rows * columns, 3, 336, 336)
    assert made.features["image_sizes"].tolist() == [[336 * rows, 336 * columns]]
    assert len(made.tokens) == (rows * columns + 1) * 144 + 1 + (rows + 1) * 12
    assert set(made.tokens) == {made.placeholder}
    whole = pixels[0, 1:].reshape(rows, columns, 3, 336, 336).transpose(2, 0, 3, 1, 4)
    whole = np.ascontiguousarray(whole.reshape(1, 3, rows * 336, columns * 336))
    small = torch.nn.functional.interpolate(
        torch.from_numpy(whole), size=(336, 336), mode="bicubic", align_corners=False
    )
    np.testing.assert_allclose(pixels[0, 0], small[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_kimi_sees_whole_squares_of_patches(tmp_path, size):
    made = write("kimi", tmp_path).prepare(item(picture(*size)))
    width, height = size
    if (width // 14) * (height // 14) > 64:
        factor = math.sqrt(64 / ((width // 14) * (height // 14)))
        width, height = int(width * factor), int(height * factor)
    rows, columns = -(-height // 28) * 2, -(-width // 28) * 2
    assert made.features["image_grid_hws"].tolist() == [[rows, columns]]
    patches = made.features["pixel_values"]
    assert patches.shape == (rows * columns, 3, 14, 14)
    assert len(made.tokens) == rows * columns // 4
    whole = patches.reshape(rows, columns, 3, 14, 14).transpose(2, 0, 3, 1, 4)
    whole = whole.reshape(3, rows * 14, columns * 14)
    assert np.all(whole[:, height:] == -1)  # black
    assert np.all(whole[:, :, width:] == -1)
    if size == (7, 13):
        expected = np.asarray(picture(*size), np.float32).transpose(2, 0, 1) / 127.5 - 1
        np.testing.assert_allclose(whole[:, :13, :7], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "tiles"), [((40, 50), (1, 1)), ((225, 100), (3, 1)), ((50, 160), (1, 2))]
)
def test_deepseek_chooses_a_resolution(tmp_path, size, tiles):
    processor = write("deepseek", tmp_path)
    made = processor.prepare(item(picture(*size)))
    across, down = tiles
    assert made.features["images_spatial_crop"].tolist() == [[across, down]]
    assert made.features["pixel_values"].shape == (1 + across * down, 3, 56, 56)
    assert len(made.tokens) == 2 * 3 + 1 + 2 * down * (2 * across + 1)
    many = processor.prepare(item(picture(*size), **{COUNT: 3}))
    assert many.features["images_spatial_crop"].tolist() == [[1, 1]]
    assert many.features["pixel_values"][0] == pytest.approx(many.features["pixel_values"][1])


def closest(size, most) -> tuple[int, int]:
    """dynamic_preprocess of the model card."""
    ratios = {
        (i, j)
        for n in range(1, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if 1 <= i * j <= most
    }
    found, least = (1, 1), float("inf")
    for ratio in sorted(ratios, key=lambda x: x[0] * x[1]):
        far = abs(size[0] / size[1] - ratio[0] / ratio[1])
        if far < least:
            found, least = ratio, far
        elif far == least and size[0] * size[1] > 0.5 * 28 * 28 * ratio[0] * ratio[1]:
            found = ratio
    return found


@pytest.mark.parametrize("size", [(28, 28), (300, 200), (30, 90), (33, 30), (400, 60)])
def test_internvl_sees_tiles_and_then_the_whole(tmp_path, size):
    processor = write("internvl", tmp_path)
    made = processor.prepare(item(picture(*size)))
    across, down = closest(size, 6)
    pixels = made.features["pixel_values"]
    count = across * down + (across * down > 1)
    assert pixels.shape == (count, 3, 28, 28)
    mean, std = ([[[x]] for x in three] for three in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    whole = picture(*size).resize((28 * across, 28 * down))
    for number in range(across * down):
        x, y = 28 * (number % across), 28 * (number // across)
        tile = np.asarray(whole.crop((x, y, x + 28, y + 28)), np.float32).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(pixels[number], (tile - mean) / std, atol=1e-5)
    small = np.asarray(picture(*size).resize((28, 28)), np.float32).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(pixels[-1], (small - mean) / std, atol=1e-5)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    text = "<img>" + "<IMG_CONTEXT>" * (4 * count) + "</img>"
    assert list(made.tokens) == backend.encode(text, add_special_tokens=False).ids
    few = processor.prepare(item(picture(*size), max_tiles=1))
    assert len(few.features["pixel_values"]) == 1


def refined(size, grid) -> tuple[int, int]:
    """get_refine_size of the published code."""
    sides = [
        max(round(n / count) * count, count) / count for n, count in zip(size, grid, strict=True)
    ]
    height = int(448 / math.sqrt(sides[0] / sides[1]))
    width = int(height * (sides[0] / sides[1]))
    return max(round(width / 14) * 14, 14), max(round(height / 14) * 14, 14)


@pytest.mark.parametrize(
    ("size", "grid"), [((300, 200), None), ((900, 450), (2, 1)), ((500, 1500), (1, 3))]
)
def test_minicpm_sees_slices(tmp_path, size, grid):
    processor = write("minicpm", tmp_path)
    made = processor.prepare(item(picture(*size), **{NUMBER: 1}))
    sizes = made.features["tgt_sizes"].tolist()
    assert len(made.features["pixel_values"]) == sum(h * w for h, w in sizes)
    slices = 0 if grid is None else grid[0] * grid[1]
    assert len(sizes) == 1 + slices
    if grid is not None:
        width, height = refined(size, grid)
        assert sizes[1:] == [[height // 14, width // 14]] * slices
    assert made.tokens.count(made.placeholder) == 3 * (1 + slices)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    text = "<image_id>1</image_id><image><unk><unk><unk></image>"
    if grid is not None:
        row = "<slice><unk><unk><unk></slice>" * grid[0]
        text += "\n".join([row] * grid[1])
    assert list(made.tokens) == backend.encode(text, add_special_tokens=False).ids


def test_what_is_no_image_is_refused(made):
    for bad in (b"no image", b""):
        with pytest.raises(UnreadableError):
            made.prepare(PrepareItem(id=1, kind="image", data=bad, max_pixels=1 << 20))
    with pytest.raises(UnreadableError, match="no audio"):
        made.prepare(PrepareItem(id=1, kind="audio", data=b"", max_pixels=1))


def test_ribbons_are_read_or_refused(made):
    for size in ((1, 3000), (3000, 1)):
        try:
            found = made.prepare(item(Image.new("RGB", size)))
        except UnreadableError:
            continue
        assert len(found.tokens) > 0


def test_other_models_are_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    assert PublishedImages.of(tmp_path) is None
