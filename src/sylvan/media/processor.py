"""The processor that a checkpoint brings, run by transformers: pixels to inputs of its encoder.

Only the parts for images are made: those for videos need libraries that servers have no use for.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.media.images import UnreadableError, decode_image
from sylvan.media.messages import Prepare, Prepared

OPTIONS = ("max_pixels", "min_pixels", "min_patches", "max_patches", "crop_to_patches")
"""Settings of a processor that a request may choose."""


class ProcessorError(Exception):
    """The checkpoint's processor cannot be used; the message says why."""


class Processor:
    """Prepares items for one checkpoint.

    Raises:
        ProcessorError: it has none, or one that cannot be used here.
    """

    def __init__(self, model_dir: Path) -> None:
        import transformers

        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        self._images: Any = transformers.AutoImageProcessor.from_pretrained(
            model_dir, backend="pil"
        )
        kind = getattr(transformers, _processor_class(model_dir), None)
        if kind is None:
            raise ProcessorError(f"there is no processor {_processor_class(model_dir)!r}")
        self._processor = _without_checks(kind, self._images, self._tokenizer, model_dir)

    def prepare(self, order: Prepare) -> Prepared:
        """Prepare one item.

        Raises:
            UnreadableError: the item is to blame.
        """
        if order.kind != "image":
            raise UnreadableError(f"this model takes images, no {order.kind}")
        image = decode_image(order.data, order.max_pixels)
        known = [name for name in OPTIONS if hasattr(self._images, name)]
        chosen = {name: order.options[name] for name in known if name in order.options}
        try:
            made = self._images([image], return_tensors="np", **chosen)
            text = self._processor.replace_image_token(made, 0)
        except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
            raise UnreadableError(f"the model's processor refuses it: {error}") from error
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        features = {name: _array(value) for name, value in made.items()}
        return Prepared(
            id=order.id,
            tokens=tuple(tokens),
            features=features,
            grid=self._grid(features),
            digest=digest_of(order.kind, features),
        )

    def _grid(self, features: Mapping[str, np.ndarray]) -> tuple[int, int, int] | None:
        found = features.get("image_grid_thw")
        if found is None:
            return None
        time, height, width = (int(n) for n in found.reshape(-1)[:3])
        merge = int(getattr(self._images, "merge_size", 1))
        return time, height // merge, width // merge


def digest_of(kind: str, features: Mapping[str, np.ndarray]) -> bytes:
    """SHA-256 of all that an encoder reads."""
    found = hashlib.sha256(kind.encode())
    for name in sorted(features):
        array = np.ascontiguousarray(features[name])
        found.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
        found.update(array.data)
    return found.digest()


def _array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _processor_class(model_dir: Path) -> str:
    """Name of the class, from the files that may say it."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = model_dir / name
        if path.exists():
            said = json.loads(path.read_text()).get("processor_class")
            if isinstance(said, str):
                return said
    raise ProcessorError("no file of the checkpoint says what prepares its images")


def _without_checks(kind: Any, images: Any, tokenizer: Any, model_dir: Path) -> Any:
    """A processor that has only these two parts."""

    class ImagesOnly(kind):
        """Its constructor insists on all parts, each of the class that it knows."""

        def check_argument_for_proper_class(self, *arguments: Any) -> None:
            """Anything will do."""

    said: dict[str, Any] = {}
    if (path := model_dir / "processor_config.json").exists():
        said = json.loads(path.read_text())
    known = inspect.signature(kind.__init__).parameters
    given = {
        name: value
        for name, value in said.items()
        if name in known and not isinstance(value, dict) and name != "processor_class"
    }
    parts = {"image_processor": images, "tokenizer": tokenizer}
    for name, parameter in known.items():
        if name.endswith(("_processor", "_extractor")) and name not in parts:
            parts[name] = None
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
    return ImagesOnly(**parts, **given)
