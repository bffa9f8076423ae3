"""Pictures and videos of a program, as backends take them."""

from __future__ import annotations

import base64
from importlib import import_module
from typing import Any

from sylvan.lang.errors import MissingExtraError


def encode_video(path: str, num_frames: int) -> str:
    """`num_frames` frames of a video at even distances, as JPEG files in base64.

    Raises:
        MissingExtraError: OpenCV is not installed.
        OSError: the file cannot be read as a video.
    """
    try:
        cv2 = import_module("cv2")
    except ImportError as error:
        raise MissingExtraError("opencv-python-headless", "video") from error
    capture = cv2.VideoCapture(path)
    try:
        total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if capture.isOpened() else 0
        wanted = [i * (total - 1) // max(num_frames - 1, 1) for i in range(num_frames)]
        frames = [_jpeg(cv2, capture, index) for index in wanted] if total else []
    finally:
        capture.release()
    if not frames:
        raise OSError(f"could not read a video from {path}")
    return "video:" + base64.b64encode(b"".join(frames)).decode()


def _jpeg(cv2: Any, capture: Any, index: int) -> bytes:
    capture.set(cv2.CAP_PROP_POS_FRAMES, index)
    ok, frame = capture.read()
    if not ok:
        raise OSError(f"could not read frame {index}")
    return cv2.imencode(".jpg", frame)[1].tobytes()
