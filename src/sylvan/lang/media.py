"""Encodes videos of a program for backends."""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sylvan.lang.errors import MissingExtraError
from sylvan.media.container import video_facts, video_frames
from sylvan.media.images import UnreadableError
from sylvan.media.source import FRAMES

_MAX_PIXELS, _MAX_SECONDS = 64 << 20, 24 * 3600.0


def encode_video(path: str, num_frames: int) -> str:
    """`num_frames` frames of a video at even distances, as JPEG files in base64.

    Raises:
        MissingExtraError: PyAV is not installed.
        OSError: the file cannot be read as a video.
    """
    if find_spec("av") is None:
        raise MissingExtraError("av", "video")
    data = Path(path).read_bytes()
    try:
        count = video_facts(data, _MAX_PIXELS, _MAX_SECONDS).count
        wanted = [i * (count - 1) // max(num_frames - 1, 1) for i in range(num_frames)]
        parts = [_jpeg(frame) for frame in video_frames(data, wanted, _MAX_PIXELS)]
    except UnreadableError as error:
        raise OSError(f"could not read a video from {path}: {error}") from error
    return FRAMES + base64.b64encode(b"".join(parts)).decode()


def _jpeg(frame: Any) -> bytes:
    file = io.BytesIO()
    frame.save(file, "JPEG", quality=95)
    return file.getvalue()
