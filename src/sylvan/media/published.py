"""Prepares images of models whose processor is part of their checkpoint's Python code.

Written after that code: Phi-3-Vision (image_processing_phi3_v.py), MiniCPM-V 2.6
(image_processing_minicpmv.py), Kimi-VL (image_processing_kimi_vl.py), DeepSeek-VL2
(processing_deepseek_vl_v2.py) and InternVL (`load_image` of its model card). Images are cut with
Pillow and numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sylvan.media.images import MAX_TILES, MIN_TILES, UnreadableError, open_image
from sylvan.media.messages import PreparedItem, PrepareItem
from sylvan.media.resize import bicubic
from sylvan.protocol.media import IMAGE_TOKENS
from sylvan.utils.json_files import read_json

NUMBER, COUNT = "number", "count"
"""Item options: index of the image in its prompt, and number of images in the prompt."""
COUNTED = frozenset({"DeepseekVLV2ForCausalLM", "MiniCPMV"})
"""Architectures whose preparation of an image depends on its index or on the number of images."""
_PHI_TILE = 336
_KIMI = "KimiVLForConditionalGeneration"
MANY = 3
"""Number of images in a prompt from which on DeepSeek-VL2 cuts none of them into tiles."""
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

Pixels = np.ndarray
Prepared = tuple[dict[str, np.ndarray], str | int]
"""Features, and the text of the image in the prompt, or its number of placeholders."""


def is_counted(model_dir: Path) -> bool:
    """Whether a checkpoint's preparation depends on the index or number of images in a prompt."""
    try:
        names = read_json(model_dir / "config.json").get("architectures") or [""]
    except (OSError, ValueError):
        return False
    return names[0] in COUNTED


class PublishedImages:
    """Prepares images for the architectures here.

    Args:
        architecture: The checkpoint's.
        model_dir: Its directory.

    Raises:
        OSError: A file is missing.
    """

    def __init__(self, architecture: str, model_dir: Path) -> None:
        self._raw = read_json(model_dir / "config.json")
        path = model_dir / "preprocessor_config.json"
        self._rules: dict[str, Any] = read_json(path) if path.is_file() else {}
        self._backend = _read_tokenizer(model_dir)
        name = IMAGE_TOKENS.get(architecture, "")
        found = self._raw.get("media_placeholder_token_id", self._backend.token_to_id(name))
        if not isinstance(found, int):
            raise OSError(f"the tokenizer has no token {name}, which stands for images")
        self._token, self._cut = found, _CUTS[architecture]

    @classmethod
    def of(cls, model_dir: Path) -> PublishedImages | None:
        """Return what prepares a checkpoint's images; None: it has another architecture."""
        names = read_json(model_dir / "config.json").get("architectures") or [""]
        return cls(names[0], model_dir) if names[0] in _CUTS else None

    def prepare(self, item: PrepareItem) -> PreparedItem:
        """Prepare one image.

        Raises:
            UnreadableError: The item is invalid.
        """
        from sylvan.media.processor import digest_of

        if item.kind != "image":
            raise UnreadableError(f"this model takes images, no {item.kind}")
        image = open_image(item, tiles=self._cut is internvl)
        try:
            features, text = self._cut(image, self._raw, self._rules, item.options)
        except (ValueError, ZeroDivisionError) as error:
            raise UnreadableError(f"this model cannot process it: {error}") from error
        if isinstance(text, int):
            tokens = [self._token] * text
        else:
            tokens = self._backend.encode(text, add_special_tokens=False).ids
        return PreparedItem(
            id=item.id,
            placeholder=self._token,
            tokens=tuple(tokens),
            features=features,
            digest=digest_of(item.kind, features),
        )


def _read_tokenizer(model_dir: Path) -> Any:
    """The tokenizer as one of the library tokenizers; transformers reads older files."""
    path = model_dir / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    import transformers

    loaded: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
    return loaded.backend_tokenizer


def _numbers(image: Any, mean: Any, std: Any) -> Pixels:
    """Normalised pixels, (3, height, width)."""
    rows = np.asarray(image, np.float32) / np.float32(255)
    return ((rows - np.array(mean, np.float32)) / np.array(std, np.float32)).transpose(2, 0, 1)


def _half(image: Any, rules: Mapping[str, Any]) -> Pixels:
    """With a mean and deviation of a half, unless the rules say otherwise."""
    half = (0.5, 0.5, 0.5)
    mean, std = (rules.get(f"image_{name}") or rules.get(name) or half for name in ("mean", "std"))
    return _numbers(image, mean, std)


def _patches(pixels: Pixels, size: int) -> Pixels:
    """Square patches, row by row: (rows * columns, 3, size, size)."""
    _, height, width = pixels.shape
    grid = pixels.reshape(3, height // size, size, width // size, size)
    return np.ascontiguousarray(grid.transpose(1, 3, 0, 2, 4).reshape(-1, 3, size, size))


def phi3v(
    image: Any, raw: Mapping[str, Any], rules: Mapping[str, Any], options: Mapping[str, Any]
) -> Prepared:
    """Scale an image to as many tiles as fit, fill up with white, and cut."""
    from PIL import Image

    turn = image.width < image.height
    if turn:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    ratio, scale = image.width / image.height, 1
    while scale * math.ceil(scale / ratio) <= int(rules.get("num_crops") or 16):
        scale += 1
    width = (scale - 1) * _PHI_TILE
    height = int(width / ratio)
    if not height:
        raise UnreadableError("it is too narrow for this model")
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    whole = Image.new("RGB", (width, -(-height // _PHI_TILE) * _PHI_TILE), (255, 255, 255))
    whole.paste(scaled, (0, (whole.height - height) // 2))
    if turn:
        whole = whole.transpose(Image.Transpose.TRANSPOSE)
    mean, std = rules.get("image_mean") or _CLIP_MEAN, rules.get("image_std") or _CLIP_STD
    pixels = _numbers(whole, mean, std)
    tiles = _patches(pixels, _PHI_TILE)
    parts = np.concatenate([bicubic(pixels, _PHI_TILE, _PHI_TILE)[None], tiles])
    rows, columns = whole.height // _PHI_TILE, whole.width // _PHI_TILE
    count = (rows * columns + 1) * 144 + 1 + (rows + 1) * 12
    sizes = np.array([[whole.height, whole.width]], np.int64)
    return {"pixel_values": parts[None], "image_sizes": sizes}, count


def kimi_vl(
    image: Any, raw: Mapping[str, Any], rules: Mapping[str, Any], options: Mapping[str, Any]
) -> Prepared:
    """Scale an image that has too many patches, and fill up whole squares of patches."""
    from PIL import Image

    patch = int(rules.get("patch_size") or raw["vision_config"]["patch_size"])
    most = int(rules.get("in_token_limit") or 4096)
    width, height = image.size
    count = (width // patch) * (height // patch)
    if count > most:
        scale = math.sqrt(most / count)
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    down, across = rules.get("merge_kernel_size") or (2, 2)
    whole = Image.new(
        "RGB",
        (width + -width % (across * patch), height + -height % (down * patch)),
    )
    whole.paste(image)
    rows, columns = whole.height // patch, whole.width // patch
    if max(rows, columns) >= 512:
        raise UnreadableError("it is too narrow for this model")
    features = {
        "pixel_values": _patches(_half(whole, rules), patch),
        "image_grid_hws": np.array([[rows, columns]], np.int64),
    }
    return features, rows * columns // (down * across)


def deepseek_vl2(
    image: Any, raw: Mapping[str, Any], rules: Mapping[str, Any], options: Mapping[str, Any]
) -> Prepared:
    """The whole image in a square, then the tiles of the best of some resolutions."""
    from PIL import Image, ImageOps

    sizes = [
        tuple(size) for size in raw.get("candidate_resolutions") or rules["candidate_resolutions"]
    ]
    tile = int(sizes[0][0])
    patch = int(rules.get("patch_size") or raw["vision_config"].get("patch_size") or 14)
    mean = rules.get("image_mean") or (0.5, 0.5, 0.5)
    ground = tuple(int(x * 255) for x in mean)
    cut = int(options.get(COUNT, 1)) < MANY
    width, height = _best(image.size, sizes) if cut else (tile, tile)
    views = [
        ImageOps.pad(image, size, Image.Resampling.BICUBIC, color=ground)
        for size in ((tile, tile), (width, height))
    ]
    first, rest = (_patches(_half(view, rules), tile) for view in views)
    side = -(
        -(tile // patch) // int((raw.get("projector_config") or {}).get("downsample_ratio", 2))
    )
    rows, columns = height // tile, width // tile
    count = side * (side + 1) + 1 + rows * side * (columns * side + 1)
    features = {
        "pixel_values": np.concatenate([first, rest]),
        "images_spatial_crop": np.array([[columns, rows]], np.int64),
    }
    return features, count


def _best(size: tuple[int, int], candidates: list[Any]) -> tuple[int, int]:
    """Return the resolution that keeps most of the image's pixels and adds least padding."""

    def score(candidate: Any) -> tuple[int, int]:
        scale = min(candidate[0] / size[0], candidate[1] / size[1])
        seen = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        return seen, seen - candidate[0] * candidate[1]

    width, height = max(candidates, key=score)
    return int(width), int(height)


def minicpmv(
    image: Any, raw: Mapping[str, Any], rules: Mapping[str, Any], options: Mapping[str, Any]
) -> Prepared:
    """The whole image, and its slices if it is large; each has a fixed number of vectors."""
    from PIL import Image

    said = {**(raw.get("slice_config") or {}), **rules}
    patch, scale = int(said.get("patch_size") or 14), int(said.get("scale_resolution") or 448)
    grid = _grid(image.size, int(said.get("max_slice_nums") or 9), scale)
    first = _fitted(image.size, scale, patch, grow=grid is None)
    views = [image.resize(first, Image.Resampling.BICUBIC)]
    if grid is not None:
        columns, rows = grid
        inner = (
            max(round(n / count) * count, count) / count
            for n, count in zip(image.size, grid, strict=True)
        )
        width, height = _fitted(tuple(inner), scale, patch, grow=True)
        whole = image.resize((width * columns, height * rows), Image.Resampling.BICUBIC)
        views += [
            whole.crop((x * width, y * height, (x + 1) * width, (y + 1) * height))
            for y in range(rows)
            for x in range(columns)
        ]
    parts = [_patches(_half(view, rules), patch) for view in views]
    sizes = [[view.height // patch, view.width // patch] for view in views]
    features = {
        "pixel_values": np.concatenate(parts),
        "tgt_sizes": np.array(sizes, np.int64),
    }
    return features, _slices_text(raw, said, grid, int(options.get(NUMBER, 0)))


def internvl(
    image: Any, raw: Mapping[str, Any], rules: Mapping[str, Any], options: Mapping[str, Any]
) -> Prepared:
    """The tiles of the best of some grids, then the whole image, if there are several."""
    size = int(raw.get("force_image_size") or raw["vision_config"]["image_size"])
    across, down = 1, 1
    if raw.get("dynamic_image_size", True):
        least = int(options.get(MIN_TILES) or raw.get("min_dynamic_patch") or 1)
        most = int(options.get(MAX_TILES) or raw.get("max_dynamic_patch") or 12)
        across, down = _nearest(image.size, min(least, most), most, size)
    mean, std = rules.get("image_mean") or _IMAGENET_MEAN, rules.get("image_std") or _IMAGENET_STD
    tiles = [_patches(_numbers(image.resize((size * across, size * down)), mean, std), size)]
    if raw.get("use_thumbnail", False) and across * down > 1:
        tiles.append(_numbers(image.resize((size, size)), mean, std)[None])
    pixels = np.concatenate(tiles)
    patch = int(raw["vision_config"]["patch_size"])
    each = int((size // patch) ** 2 * float(raw.get("downsample_ratio", 0.5)) ** 2)
    fill = IMAGE_TOKENS["InternVLChatModel"] * (each * len(pixels))
    return {"pixel_values": pixels}, f"<img>{fill}</img>"


def _nearest(size: tuple[int, int], least: int, most: int, side: int) -> tuple[int, int]:
    """Tiles across and down, in the shape nearest to the image's; more if pixels suffice."""
    grids = {
        (across, down)
        for count in range(least, most + 1)
        for across in range(1, count + 1)
        for down in range(1, count + 1)
        if least <= across * down <= most
    }
    width, height = size
    best, nearest = (1, 1), math.inf
    for across, down in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        far = abs(width / height - across / down)
        larger = far == nearest and width * height > 0.5 * side * side * across * down
        if far < nearest or larger:
            best, nearest = (across, down), far
    return best


def _slices_text(
    raw: Mapping[str, Any], said: Mapping[str, Any], grid: tuple[int, int] | None, number: int
) -> str:
    fill = IMAGE_TOKENS["MiniCPMV"] * int(raw.get("query_num") or 64)
    text = f"<image>{fill}</image>"
    if said.get("use_image_id", raw.get("use_image_id", True)):
        text = f"<image_id>{number}</image_id>{text}"
    if grid is None:
        return text
    columns, rows = grid
    return text + "\n".join([f"<slice>{fill}</slice>" * columns] * rows)


def _grid(size: tuple[int, int], most: int, scale: int) -> tuple[int, int] | None:
    """How many slices an image has across and down; None: it is not cut."""
    width, height = size
    count = min(math.ceil(width * height / (scale * scale)), most)
    if count <= 1:
        return None
    grids = [
        (across, slices // across)
        for slices in (count - 1, count, count + 1)
        if 1 < slices <= most
        for across in range(1, slices + 1)
        if slices % across == 0
    ]
    wanted = math.log(width / height)
    return min(grids, key=lambda grid: abs(wanted - math.log(grid[0] / grid[1])), default=(1, 1))


def _fitted(size: tuple[float, ...], scale: int, patch: int, *, grow: bool) -> tuple[int, int]:
    """A size of whole patches with the shape of an image, and about `scale` squared pixels."""
    width, height = size
    if width * height > scale * scale or grow:
        ratio = width / height
        height = int(scale / math.sqrt(ratio))
        width = int(height * ratio)
    return max(round(width / patch) * patch, patch), max(round(height / patch) * patch, patch)


_CUTS: Mapping[str, Callable[..., Prepared]] = MappingProxyType(
    {
        "DeepseekVLV2ForCausalLM": deepseek_vl2,
        "InternVLChatModel": internvl,
        "MiniCPMV": minicpmv,
        "Phi3VForCausalLM": phi3v,
        _KIMI: kimi_vl,
    }
)
