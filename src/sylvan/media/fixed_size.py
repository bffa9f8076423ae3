"""Prepares images that a checkpoint scales to one size, with Pillow and numpy alone.

The processors of transformers take seconds to be imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from sylvan.media.images import UnreadableError, open_image
from sylvan.media.messages import PreparedItem, PrepareItem

_IMAGE_PROCESSORS = frozenset({"SiglipImageProcessor", "SiglipImageProcessorFast"})


class _Size(msgspec.Struct, forbid_unknown_fields=True):
    height: int
    width: int


class _ImageRules(msgspec.Struct):
    """preprocessor_config.json, where it says what is done here."""

    image_processor_type: str
    size: _Size
    image_mean: list[float]
    image_std: list[float]
    resample: int = 3
    rescale_factor: float = 1 / 255
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_center_crop: bool | None = None
    do_pad: bool | None = None


class _PlaceRules(msgspec.Struct):
    """processor_config.json: the tokens of an image."""

    processor_class: str
    patch_size: int
    vision_feature_select_strategy: str
    num_additional_image_tokens: int = 0


class FixedSizeImages:
    """Prepares images as LLaVA with SigLIP does: whole, scaled to one size.

    The numbers are those of transformers, bit for bit.
    """

    def __init__(self, images: _ImageRules, places: _PlaceRules, token: int) -> None:
        self._images = images
        self._token = token
        size = images.size
        count = (size.height // places.patch_size) * (size.width // places.patch_size)
        self._tokens = (token,) * (count + places.num_additional_image_tokens)

    @classmethod
    def of(cls, model_dir: Path) -> FixedSizeImages | None:
        """Return what prepares a checkpoint's images; None: its processor does more."""
        try:
            images = msgspec.convert(_read(model_dir / "preprocessor_config.json"), _ImageRules)
            places = msgspec.convert(_read(model_dir / "processor_config.json"), _PlaceRules)
        except (OSError, ValueError):
            return None
        config = _read(model_dir / "config.json")
        token = config.get("image_token_index", config.get("image_token_id"))
        done = images.do_resize and images.do_rescale and images.do_normalize
        others = images.do_center_crop or images.do_pad
        known = images.image_processor_type in _IMAGE_PROCESSORS and isinstance(token, int)
        plain = places.vision_feature_select_strategy == "full"
        if not (known and done and plain) or others or places.processor_class != "LlavaProcessor":
            return None
        return cls(images, places, cast("int", token))

    def prepare(self, item: PrepareItem) -> PreparedItem:
        """Prepare one image.

        Raises:
            UnreadableError: The item is invalid.
        """
        from sylvan.media.processor import digest_of

        if item.kind != "image":
            raise UnreadableError(f"this model takes images, no {item.kind}")
        features = {"pixel_values": self._pixels(open_image(item))}
        return PreparedItem(
            id=item.id,
            placeholder=self._token,
            tokens=self._tokens,
            features=features,
            digest=digest_of(item.kind, features),
        )

    def _pixels(self, image: Any) -> np.ndarray:
        """Scaled and normalised. Shape: (1, 3, height, width)."""
        rules = self._images
        scaled = image.resize((rules.size.width, rules.size.height), resample=rules.resample)
        rows = (np.asarray(scaled).astype(np.float64) * rules.rescale_factor).astype(np.float32)
        mean, std = np.array(rules.image_mean, np.float32), np.array(rules.image_std, np.float32)
        return np.ascontiguousarray(((rows - mean) / std).transpose(2, 0, 1)[None])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
