"""Decodes image files to RGB pixels, with Pillow."""

from __future__ import annotations

import io
import warnings
from typing import Any

from sylvan.media.messages import PrepareItem

MAX_SIDE = "max_side"
"""Item option: scale the image down until its longer side has this many pixels."""
MAX_TILES, MIN_TILES = "max_tiles", "min_tiles"
"""Item options: smallest and largest number of tiles that an image is cut into."""

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
"""Accepted formats; readers of rarer formats are excluded to reduce the attack surface."""


class UnreadableError(ValueError):
    """A file cannot be decoded; the message says why."""


def open_image(item: PrepareItem, *, tiles: bool = False) -> Any:
    """Decode an image, and scale it down if its options say so.

    Args:
        item: The image, and its options.
        tiles: Whether the number of tiles can be chosen.

    Raises:
        UnreadableError: As `decode_image`; or the options set the number of tiles in vain.
    """
    options = item.options
    if not tiles and (MAX_TILES in options or MIN_TILES in options):
        raise UnreadableError("this model fixes the number of tiles")
    image = decode_image(item.data, item.max_pixels)
    if (side := options.get(MAX_SIDE)) is not None:
        image.thumbnail((side, side))
    return image


def decode_image(data: bytes, max_pixels: int) -> Any:
    """Return the first frame of an image, upright, in RGB, with transparency on white.

    Args:
        data: The file.
        max_pixels: Limit of width times height.

    Returns: A `PIL.Image.Image`.

    Raises:
        UnreadableError: It is not an image, is damaged, has too many pixels, or there is no Pillow.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        message = "reading an image needs the package pillow; install sylvan[multimodal]"
        raise UnreadableError(message) from error
    Image.init()  # registers decoders once
    Image.MAX_IMAGE_PIXELS = None  # check the size here, before decoding
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(*image.size, max_pixels)
            image.seek(0)
            image.load()
            return _rgb(Image, ImageOps.exif_transpose(image))
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"the image cannot be decoded ({type(error).__name__})") from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnreadableError(
            f"{width} x {height} pixels are more than {max_pixels} (media.pixels)"
        )
    if not width or not height:
        raise UnreadableError("it has no pixels")


def _rgb(library: Any, image: Any) -> Any:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = library.new("RGBA", image.size, (255, 255, 255, 255))
        return library.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")
