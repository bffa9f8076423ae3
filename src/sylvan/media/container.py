"""Decodes video and audio files with PyAV (FFmpeg): evenly spaced frames, and samples."""

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
"""Allowed demuxers. Playlist demuxers are excluded, because they open other URLs."""


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Properties of a video.

    Attributes:
        count: Number of frames.
        fps: Frames per second.
        width: Width in pixels.
        height: Height in pixels.
    """

    count: int
    fps: float
    width: int
    height: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.count / self.fps


@contextmanager
def opened(data: bytes, kind: str) -> Iterator[Any]:
    """Open the container of a file.

    Raises:
        UnreadableError: It is malformed; also raised for errors inside the context.
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
                raise UnreadableError(f"{container.format.name} is not an accepted {kind} format")
            yield container
    except (FFmpegError, OSError, ValueError, IndexError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(f"the {kind} cannot be decoded ({type(error).__name__})") from None


def video_facts(data: bytes, max_pixels: int, max_seconds: float) -> VideoFacts:
    """Count the frames of a video, without trusting its header.

    Args:
        data: The file.
        max_pixels: Limit of a frame.
        max_seconds: Limit of the duration.

    Raises:
        UnreadableError: It is malformed, has no frames, or is too large or too long.
    """
    with opened(data, "video") as container:
        if not container.streams.video:
            raise UnreadableError("it has no video track")
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
    """Return frames of a video as `PIL.Image.Image`.

    Args:
        data: The file.
        wanted: Their indices, ascending; a truncated video repeats its last frame.
        max_pixels: Limit of a frame; a stream may change its size.

    Raises:
        UnreadableError: It is malformed, or has no frames.
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
    """Decode audio to mono.

    Args:
        data: The file; for a video, its audio track.
        rate: Samples per second.
        max_seconds: Limit of the duration.

    Returns: float32 (N,), from -1 to 1.

    Raises:
        UnreadableError: It is malformed, empty, or too long.
    """
    import av

    parts: list[np.ndarray] = []
    total, most = 0, int(max_seconds * rate)
    with opened(data, "sound") as container:
        if not container.streams.audio:
            raise UnreadableError("it has no audio track")
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
        raise UnreadableError("it has no audio track")
    samples = np.concatenate(parts).astype(np.float32, copy=False)
    if not np.isfinite(samples).all():
        raise UnreadableError("it contains samples that are not numbers")
    return samples


def _too_long(kind: str, seconds: float, most: float) -> UnreadableError:
    return UnreadableError(
        f"a {kind} of at least {seconds:.0f} s is longer than {most:g} s (media.seconds)"
    )
