"""Images, videos and audio in bodies, in the formats of all APIs.

A part becomes `{"type": "image", "source": MediaSource}` among the parts of a message;
`split_media` takes the sources out again, before a template sees the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sylvan.media.images import MAX_SIDE, MAX_TILES, MIN_TILES
from sylvan.media.precomputed import FORMAT, read_vectors
from sylvan.media.source import MediaSource, read_source
from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import MediaKind

SOURCE = "source"
MAX_FPS, MAX_FRAMES = 60, 4096
MAX_COUNT, MAX_LONG_SIDE = 1024, 1 << 16  # limits of tiles and of pixels
_LOW_DETAIL_PIXELS = 512 * 512  # as OpenAI defines `detail: low`
_DETAILS = ("auto", "low", "high", "original")

_NUMBERS: Mapping[MediaKind, tuple[tuple[str, str, int, type], ...]] = {
    "image": (
        ("max_long_side_pixel", MAX_SIDE, MAX_LONG_SIDE, int),
        ("max_dynamic_patch", MAX_TILES, MAX_COUNT, int),
        ("min_dynamic_patch", MIN_TILES, MAX_COUNT, int),
    ),
    "video": (("fps", "fps", MAX_FPS, float), ("max_frames", "max_frames", MAX_FRAMES, int)),
}
"""Numeric options: name in bodies, item option, largest value, whether fractions are allowed."""

_KINDS: Mapping[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
}


def media_kind(part_type: str) -> MediaKind | None:
    """Return the kind of media in a content part of this type; None: none."""
    return _KINDS.get(part_type)


def openai_media(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Parse a content part of the OpenAI APIs.

    Args:
        part: Its `type` is one that `media_kind` knows.
        path: Its path in the body.

    Raises:
        RequestError: It contains no media; the message names the field.
    """
    form = str(part["type"])
    kind = _KINDS[form]
    name = form if form in part else f"{kind}_url"
    value: Any = part.get(name)
    given: Mapping[str, Any] = part
    where = path
    if isinstance(value, Mapping):
        given, where = {**part, **value}, f"{path}.{name}"
        inner = next((n for n in ("url", "data") if n in value), "url")
        name, value = f"{name}.{inner}", value.get(inner)
    options = media_options(kind, given, where)
    return _part(read_source(kind, value, f"{path}.{name}", options))


def media_options(kind: MediaKind, given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Read the processing options of a part.

    Of images `detail`, `max_long_side_pixel` and `{max,min}_dynamic_patch`; of videos `fps` and
    `max_frames`.

    Raises:
        RequestError: A value is invalid or too large; the message names the field.
    """
    options: dict[str, Any] = {}
    detail = given.get("detail") if kind == "image" else None
    if detail is not None and detail not in _DETAILS:
        message = f"{path}.detail must be one of {', '.join(_DETAILS)}."
        raise RequestError(message, param=f"{path}.detail")
    if detail == "low":
        options["max_pixels"] = _LOW_DETAIL_PIXELS
    for name, ours, most, form in _NUMBERS.get(kind, ()):
        number = given.get(name)
        if number is None:
            continue
        whole = isinstance(number, int) or (form is float and isinstance(number, float))
        if isinstance(number, bool) or not whole or not 0 < number <= most:
            what = "a number" if form is float else "a whole number"
            message = f"{path}.{name} must be {what} above 0 and at most {most}."
            raise RequestError(message, param=f"{path}.{name}")
        options[ours] = form(number)
    if options.get(MIN_TILES, 0) > options.get(MAX_TILES, MAX_COUNT):
        message = f"{path}.min_dynamic_patch is more than max_dynamic_patch."
        raise RequestError(message, param=f"{path}.min_dynamic_patch")
    return options


def anthropic_media(source: object, path: str) -> dict[str, Any]:
    """Parse the `source` of an Anthropic image block.

    Raises:
        RequestError: It contains no image; the message names the field.
    """
    given: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    form = given.get("type")
    if form == "url":
        return _part(read_source("image", given.get("url"), f"{path}.source.url"))
    if form == "base64":
        data = given.get("data")
        if isinstance(data, bytes):  # a page that was rendered here
            return _part(read_source("image", data, f"{path}.source.data"))
        media_type = str(given.get("media_type") or "image/png")
        if isinstance(data, str):
            url = f"data:{media_type};base64,{data}"
            return _part(read_source("image", url, f"{path}.source.data"))
        return _part(read_source("image", data, f"{path}.source.data"))
    message = f"{path}.source.type must be 'base64' or 'url'."
    raise RequestError(message, param=f"{path}.source.type")


def with_images(text: str, images: Sequence[str], path: str) -> str | list[dict[str, Any]]:
    """Build the content of an Ollama message: images before text.

    Raises:
        RequestError: An item is not an image; the message names it.
    """
    if not images:
        return text
    parts = [_part(read_source("image", im, f"{path}[{i}]")) for i, im in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


def native_media(
    kind: MediaKind, given: object, field: str, size: int, *, is_batch: bool
) -> list[list[MediaSource]]:
    """Return the media items of each prompt in a `/generate` body.

    Args:
        kind: Kind of the items.
        given: The field's value: an item, a list of items, or in a batch one of these per prompt.
        field: Name of the field.
        size: Number of prompts.
        is_batch: Whether the prompts were given as a list.

    Raises:
        RequestError: An item is invalid, or the number of lists is not that of the prompts.
    """
    if given is None:
        return [[] for _ in range(size)]
    if not is_batch:
        items = given if isinstance(given, list) else [given]
        paths = [f"{field}[{i}]" for i in range(len(items))] if isinstance(given, list) else [field]
        return [[_native(kind, x, path) for x, path in zip(items, paths, strict=True)]]
    if not isinstance(given, list) or len(given) != size:
        message = f"{field}: expected a list with an entry for each of {size} prompts."
        raise RequestError(message, param=field)
    found: list[list[MediaSource]] = []
    for i, entry in enumerate(given):
        items = entry if isinstance(entry, list) else [] if entry is None else [entry]
        found.append([_native(kind, item, f"{field}[{i}]") for item in items])
    return found


def media_part(kind: MediaKind, given: object, path: str) -> dict[str, Any]:
    """Return the part of a message with an item.

    Raises:
        RequestError: It is not an address, data URL or base64; the message names the path.
    """
    return _part(read_source(kind, given, path))


def split_media(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[MediaSource]]:
    """Return the messages without sources, and the sources in order."""
    sources = [
        part[SOURCE]
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if _has_source(part)
    ]
    if not sources:
        return list(messages), []
    return [_without_sources(message) for message in messages], sources


def _without_sources(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": part["type"]} if _has_source(part) else part for part in content]
    return {**message, "content": parts}


def _has_source(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get(SOURCE), MediaSource)


def _native(kind: MediaKind, item: object, path: str) -> MediaSource:
    if not isinstance(item, Mapping):
        return read_source(kind, item, path)
    given: Mapping[str, Any] = item
    if given.get("format") == FORMAT:
        return read_vectors(kind, given, path)
    value = given.get("url") or given.get(kind) or given.get("data")
    return read_source(kind, value, path, media_options(kind, given, path))


def _part(source: MediaSource) -> dict[str, Any]:
    return {"type": source.kind, SOURCE: source}
