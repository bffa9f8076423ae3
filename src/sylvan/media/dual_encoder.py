"""Prepares images for models with one encoder for texts and one for images (CLIP, SigLIP).

An image has a vector of its own; no prompt surrounds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sylvan.media.images import UnreadableError, open_image
from sylvan.media.messages import PreparedItem, PrepareItem
from sylvan.protocol.media import APART_TOKEN
from sylvan.utils.json_files import read_json

_ARCHITECTURES = frozenset({"CLIPModel", "Siglip2Model", "SiglipModel"})


class DualEncoderImages:
    """Prepares images with the checkpoint's image processor, without prompts."""

    def __init__(self, images: Any) -> None:
        self._images = images

    @classmethod
    def of(cls, model_dir: Path) -> DualEncoderImages | None:
        """Return what prepares a checkpoint's images; None: its text part reads them.

        Raises:
            OSError: It has no image processor.
        """
        names = read_json(model_dir / "config.json").get("architectures") or [""]
        if names[0] not in _ARCHITECTURES:
            return None
        from transformers import AutoImageProcessor

        return cls(AutoImageProcessor.from_pretrained(model_dir, backend="pil"))

    def prepare(self, item: PrepareItem) -> PreparedItem:
        """Prepare one image.

        Raises:
            UnreadableError: The item is invalid.
        """
        from sylvan.media.processor import digest_of

        if item.kind != "image":
            raise UnreadableError(f"this model takes images, no {item.kind}")
        image = open_image(item)
        try:
            made = self._images([image], return_tensors="np")
        except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
            raise UnreadableError(f"the model's processor refuses it: {error}") from error
        features = {name: np.asarray(value) for name, value in made.items()}
        return PreparedItem(
            id=item.id,
            placeholder=APART_TOKEN,
            tokens=(APART_TOKEN,),
            features=features,
            digest=digest_of(item.kind, features),
        )
