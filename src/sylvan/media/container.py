"""Files of videos and sounds, with PyAV (FFmpeg): frames at even distances, and samples."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sylvan.media.images import UnreadableError

FORMATS = (
    *("aac", "aiff", "asf", "avi", "flac", "flv", "gif", "matroska", "mjpeg", "mov", "mp3"),
    *("mpeg", "mpegts", "ogg", "wav", "webm"),
)
"""Readers that are used. Those of playlists are not among them: they would open other addresses."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Of the frames of a video.

    Attributes:
        count: How many there are.
        fps: How many are shown in a second.
        width: In pixels.
        height: In pixels.
    """

    count: int
    fps: float
    width: int
    height: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.count / self.fps


@contextmanager
def opened(data: bytes, kind: str) -> Iterator[Any]:
    """A container of one file.

    Raises:
        UnreadableError: It is none, or damaged; also from inside the block.
    """
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        message = f"reading a {kind} needs the package av; install sylvan[multimodal]"
        raise UnreadableError(message) from error
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), options=options) as container:
            if not set(container.format.name.split(",")) & set(FORMATS):
                raise UnreadableError(f"{container.format.name} is not read as a {kind}")
            yield container
    except (FFmpegError, OSError, ValueError, IndexError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(
            f"it is no {kind} that can be read ({type(error).__name__})"
        ) from None


def video_facts(data: bytes, max_pixels: int, max_seconds: float) -> VideoFacts:
    """Count the frames of a video; what its header says of them is not believed.

    Args:
        data: The file.
        max_pixels: Of a frame.
        max_seconds: Of the video.

    Raises:
        UnreadableError: It is none, has no frames, or is too large or too long.
    """
    with opened(data, "video") as container:
        if not container.streams.video:
            raise UnreadableError("it has no pictures")
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > max_pixels:
            raise UnreadableError(
                f"{width} x {height} pixels are more than {max_pixels} (media.pixels)"
            )
        count = sum(1 for packet in container.demux(stream) if packet.size)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    if not count or not width or not height:
        raise UnreadableError("it has no frames")
    facts = VideoFacts(count, fps if math.isfinite(fps) and fps > 0 else 24.0, width, height)
    if facts.seconds > max_seconds:
        raise _too_long("video", facts.seconds, max_seconds)
    return facts


def video_frames(data: bytes, wanted: Sequence[int], max_pixels: int) -> Iterator[Any]:
    """Frames of a video as `PIL.Image.Image`.

    Args:
        data: The file.
        wanted: Their numbers, ascending; a video that ends early repeats its last frame.
        max_pixels: Of a frame; a stream may change its size.

    Raises:
        UnreadableError: It cannot be read, or has no frame.
    """
    left = list(wanted)
    last = None
    with opened(data, "video") as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        for number, frame in enumerate(container.decode(stream)):
            if frame.width * frame.height > max_pixels:
                raise UnreadableError(f"a frame has more than {max_pixels} pixels (media.pixels)")
            last = frame
            while left and left[0] == number:
                yield frame.to_image()
                left.pop(0)
            if not left:
                return
        if last is None:
            raise UnreadableError("it has no frames")
        for _ in left:
            yield last.to_image()


def sound_samples(data: bytes, rate: int, max_seconds: float) -> np.ndarray:
    """All of a sound, its channels mixed.

    Args:
        data: The file; of a video its sound.
        rate: Samples of a second.
        max_seconds: Of the sound.

    Returns: float32 (N,), from -1 to 1.

    Raises:
        UnreadableError: It is none, is empty, or too long.
    """
    import av

    parts: list[np.ndarray] = []
    total, most = 0, int(max_seconds * rate)
    with opened(data, "sound") as container:
        if not container.streams.audio:
            raise UnreadableError("it has no sound")
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", rate=rate)  # its mix of channels is louder

        def take(frame: Any) -> None:
            nonlocal total
            for made in resampler.resample(frame):
                samples = made.to_ndarray().mean(0)
                total += len(samples)
                if total > most:
                    raise _too_long("sound", total / rate, max_seconds)
                parts.append(samples)

        for frame in container.decode(stream):
            take(frame)
        take(None)
    if not total:
        raise UnreadableError("it has no sound")
    samples = np.concatenate(parts).astype(np.float32, copy=False)
    if not np.isfinite(samples).all():
        raise UnreadableError("it has samples that are no numbers")
    return samples


def _too_long(kind: str, seconds: float, most: float) -> UnreadableError:
    return UnreadableError(
        f"a {kind} of at least {seconds:.0f} s is longer than {most:g} s (media.seconds)"
    )
