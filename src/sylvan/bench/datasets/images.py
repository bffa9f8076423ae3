"""Random texts with images, like SGLang's data set `image`; for multimodal models."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import DataConfig
from sylvan.protocol.errors import ConfigError

OUTPUT_TOKENS = 1024
MAX_SIDE = 8192
MAX_BYTES = 4 << 30
"""Total size of all images: they are created before the first request."""
_SIZES: Mapping[str, tuple[int, int]] = {
    "4k": (2160, 3840),
    "1080p": (1080, 1920),
    "720p": (720, 1280),
    "360p": (360, 640),
}


def load(config: DataConfig, prompts: RandomPrompts) -> Sequence[BenchConversation]:
    """See `sylvan.bench.datasets.load`. All images differ, so that none is cached.

    Raises:
        ConfigError: `data.image_size` is invalid, there are too many images, or Pillow is missing.
    """
    size = size_of(config.image_size)
    rng = np.random.default_rng(config.seed)
    made: list[BenchConversation] = []
    left = MAX_BYTES
    for _ in range(config.requests):
        pictures = [_picture(config, size, rng) for _ in range(config.images)]
        left -= sum(map(len, pictures))
        if left < 0:
            raise ConfigError(
                f"data.requests: images of the first {len(made) + 1} requests are larger than the "
                f"limit of {MAX_BYTES >> 30} GiB in all; use fewer requests, or a smaller "
                "data.image_size"
            )
        made.append(BenchConversation([_turn(config, prompts, pictures)]))
    return made


def size_of(text: str) -> tuple[int, int]:
    """Parse height and width from `data.image_size`.

    Raises:
        ConfigError: It is malformed.
    """
    known = _SIZES.get(text.lower())
    if known is not None:
        return known
    height, cross, width = text.lower().partition("x")
    sides = (height, width)
    if cross and all(side.isdecimal() and 1 <= int(side) <= MAX_SIDE for side in sides):
        return int(height), int(width)
    names = ", ".join(_SIZES)
    raise ConfigError(
        f"data.image_size: expected {names} or HEIGHTxWIDTH of at most {MAX_SIDE}, got {text!r}"
    )


def _turn(config: DataConfig, prompts: RandomPrompts, pictures: Sequence[str]) -> BenchTurn:
    output = prompts.length(config.output_tokens or OUTPUT_TOKENS, config.range_ratio)
    text, ids = prompts.draw(prompts.length(config.input_tokens, config.range_ratio))
    text, ids = prompts.with_suffix(text, ids)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture}} for picture in pictures
    ]
    content = [*parts, {"type": "text", "text": text}]
    return BenchTurn(text, len(ids), output, messages=[{"role": "user", "content": content}])


def _picture(config: DataConfig, size: tuple[int, int], rng: np.random.Generator) -> str:
    """Return an image as data URL."""
    try:
        from PIL import Image  # needs an extra
    except ImportError as error:
        raise ConfigError(
            "data.dataset image creates images with Pillow: pip install 'sylvan[multimodal]'"
        ) from error
    if config.image_content == "blank":
        color = rng.integers(0, 256, 3, np.uint8)
        pixels = np.broadcast_to(color, (*size, 3))
    else:
        pixels = rng.integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, config.image_format)
    data = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{config.image_format};base64,{data}"
