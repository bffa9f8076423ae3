"""Runs a checkpoint's processor with transformers: pixels and samples to features."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.media.images import MAX_TILES, MIN_TILES, UnreadableError, open_image
from sylvan.media.messages import PreparedItem, PrepareItem
from sylvan.media.sounds import Sounds
from sylvan.media.videos import prepare_video, video_rules
from sylvan.protocol.media import listed

MAX_PIXELS = "max_pixels"
"""Item option: scale to at most this many pixels."""


_NOT_READ = ("rows", "cols")  # by encoders
_TILES = "return_row_col_info"  # the tiling of an image; some processors write it into the prompt

_TILE_COUNTS: Mapping[str, str] = {"max_patches": MAX_TILES, "min_patches": MIN_TILES}
"""Settings of processors that cut images into tiles -> item options."""

_PLACEHOLDERS: Mapping[str, str] = {
    "Gemma3Processor": "boi_token",
    "Llama4Processor": "fake_image_token",
}
"""Attributes of processors with an item's placeholder text, if not `image_token`."""


class ProcessorError(Exception):
    """The checkpoint's processor is unusable; the message says why."""


class Processor:
    """Prepares items for one checkpoint.

    Raises:
        ProcessorError: There is none, or it is unusable here.
    """

    def __init__(self, model_dir: Path) -> None:
        import transformers

        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        kind = _find(_processor_class(model_dir))
        known = inspect.signature(kind.__init__).parameters
        parts: dict[str, Any] = {"tokenizer": self._tokenizer}
        self._images: Any = None
        self._sounds: Sounds | None = None
        if "image_processor" in known:
            self._images = parts["image_processor"] = (
                transformers.AutoImageProcessor.from_pretrained(model_dir, backend="pil")
            )
        heard = next((n for n in ("feature_extractor", "audio_processor") if n in known), None)
        if heard:
            extractor = transformers.AutoFeatureExtractor.from_pretrained(model_dir)
            parts[heard] = extractor
        self._processor = _without_checks(kind, parts, model_dir)
        if self._images is not None:
            self._known = frozenset(getattr(self._images.valid_kwargs, "__annotations__", ()))
            self._defaults = _defaults(kind, "images_kwargs")
            if _TILES in self._known:
                self._defaults[_TILES] = True
        self._videos = video_rules(model_dir, kind.__name__, self._images)
        if heard:
            defaults = _defaults(kind, "audio_kwargs")
            self._sounds = Sounds(model_dir, parts[heard], self._processor, kind.__name__, defaults)
        self._placeholders = self._found_placeholders(kind)

    def prepare(self, item: PrepareItem) -> PreparedItem:
        """Prepare one item.

        Raises:
            UnreadableError: The item is invalid.
        """
        if item.kind not in self._placeholders:
            takes = listed(self._placeholders)
            raise UnreadableError(f"this model takes {takes}, no {item.kind}")
        grid, step, around = None, 1.0, None
        if item.kind == "image":
            features, text = self._image(item)
            grid = self._grid(features)
        elif item.kind == "video":
            assert self._videos is not None
            features, text, grid, step = prepare_video(
                item, self._videos, self._images, self._processor
            )
            around = self._fences(text)
        else:
            assert self._sounds is not None
            features, text = self._sounds.prepare(item)
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        features = {name: _array(value) for name, value in features.items()}
        return PreparedItem(
            id=item.id,
            placeholder=self._placeholders[item.kind],
            tokens=tuple(tokens),
            features=features,
            around=around,
            grid=grid,
            time_step=step,
            digest=digest_of(item.kind, features),
        )

    def _image(self, item: PrepareItem) -> tuple[dict[str, Any], str]:
        image = open_image(item, tiles=_TILE_COUNTS.keys() <= self._known)
        try:
            settings = {**self._defaults, **self._sizes(item), "return_tensors": "np"}
            made = self._images([image], **settings)
            text = self._processor.replace_image_token(made, 0)
        except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
            raise UnreadableError(f"the model's processor refuses it: {error}") from error
        return {name: value for name, value in made.items() if name not in _NOT_READ}, text

    def _found_placeholders(self, kind: Any) -> dict[str, int]:
        """Return the placeholder tokens, by the media kinds that can be prepared.

        Raises:
            ProcessorError: There are none.
        """
        names = {"image": _PLACEHOLDERS.get(kind.__name__, "image_token")}
        if self._images is None:
            names = {}
        if self._videos is not None:
            names["video"] = "video_token"
        if self._sounds is not None:
            names["audio"] = "audio_token"
        found: dict[str, int] = {}
        for media, name in names.items():
            text = getattr(self._processor, name, None)
            token = self._tokenizer.convert_tokens_to_ids(text) if isinstance(text, str) else None
            if isinstance(token, int) and token != self._tokenizer.unk_token_id:
                found[media] = token
        if not found:
            kinds = " or ".join(names) or "item"
            raise ProcessorError(f"{kind.__name__} has no token that stands for an {kinds}")
        return found

    def _fences(self, text: str) -> tuple[int, int] | None:
        """Return the tokens around a video for which its text has a counterpart per time."""
        names = ("vision_start_token", "vision_end_token")
        ends: list[Any] = [getattr(self._processor, name, None) for name in names]
        if None in ends or not text.endswith(ends[1]):
            return None
        first, last = self._tokenizer.convert_tokens_to_ids(ends)
        return first, last

    def _sizes(self, item: PrepareItem) -> dict[str, Any]:
        """Return the image size options of a request that this processor supports."""
        options = item.options
        counts = {ours: options[name] for ours, name in _TILE_COUNTS.items() if name in options}
        if counts:
            return counts
        most = item.options.get(MAX_PIXELS)
        size = getattr(self._images, "size", None)
        if most is None or MAX_PIXELS not in self._known or size is None:
            return {}
        least = min(most, size["shortest_edge"])
        return {"size": {"longest_edge": min(most, size["longest_edge"]), "shortest_edge": least}}

    def _grid(self, features: Mapping[str, np.ndarray]) -> tuple[int, int, int] | None:
        found = features.get("image_grid_thw")
        if found is None:
            return None
        time, height, width = (int(n) for n in np.asarray(found).reshape(-1)[:3])
        merge = int(getattr(self._images, "merge_size", 1))
        return time, height // merge, width // merge


def _defaults(kind: Any, modality: str) -> dict[str, Any]:
    """Return a processor class's defaults for one of its parts."""
    own = getattr(kind, modality, None)
    older = getattr(kind.valid_processor_kwargs, "_defaults", {}).get(modality, {})
    return {**older, **(own if isinstance(own, dict) else {})}


def digest_of(kind: str, features: Mapping[str, np.ndarray]) -> bytes:
    """Return the SHA-256 of all encoder inputs."""
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
    """Return the class name, from the files that may contain it."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = model_dir / name
        if path.exists():
            said = json.loads(path.read_text()).get("processor_class")
            if isinstance(said, str):
                return said
    raise ProcessorError("no file of the checkpoint says what prepares its images or sounds")


def _find(name: str) -> Any:
    """Return a processor class, even if libraries for unused parts are missing.

    Raises:
        ProcessorError: There is none of that name.
    """
    mapping: Any = importlib.import_module("transformers.models.auto.processing_auto")
    known = mapping.PROCESSOR_MAPPING_NAMES.items()
    families = [family for family, processor in known if processor == name]
    for family in (*families, name.removesuffix("Processor").lower()):
        stem = family.replace("-", "_")
        path = f"transformers.models.{stem}.processing_{stem}"
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and path.startswith(error.name):
                continue  # a family that shares another family's processor
            raise ProcessorError(f"{name} needs the package {error.name}") from error
        if hasattr(module, name):
            return getattr(module, name)
    raise ProcessorError(f"there is no processor {name!r}")


def _without_checks(kind: Any, parts: Mapping[str, Any], model_dir: Path) -> Any:
    """Return a processor class with only these parts."""

    class SomeParts(kind):
        """Its constructor requires all parts, each of the expected class."""

        def check_argument_for_proper_class(self, *arguments: Any) -> None:
            """Accept anything."""

    said: dict[str, Any] = {}
    if (path := model_dir / "processor_config.json").exists():
        said = json.loads(path.read_text())
    known = inspect.signature(kind.__init__).parameters
    given = {
        name: value
        for name, value in said.items()
        if name in known and not isinstance(value, dict) and name != "processor_class"
    }
    missing = {
        name: None
        for name in known
        if name.endswith(("_processor", "_extractor")) and name not in parts
    }
    return SomeParts(**parts, **missing, **given)
