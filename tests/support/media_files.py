"""Small video and audio files."""

from __future__ import annotations

import io
import wave

import av
import numpy as np


def mp4(count: int = 12, fps: int = 6, width: int = 64, height: int = 48, seed: int = 0) -> bytes:
    """Return a video whose frames brighten from black to white, over a pattern."""
    rng = np.random.default_rng(seed)
    pattern = rng.integers(0, 8, (height, width, 3))
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 2_000_000
        for number in range(count):
            level = 240 * number // max(count - 1, 1)
            pixels = (pattern + level).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def wav(seconds: float = 0.5, rate: int = 16000, channels: int = 1, hertz: float = 440.0) -> bytes:
    """Return a tone, the same on all channels."""
    at = np.arange(int(seconds * rate)) / rate
    samples = (0.5 * 32767 * np.sin(2 * np.pi * hertz * at)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as sink:
        sink.setnchannels(channels)
        sink.setsampwidth(2)
        sink.setframerate(rate)
        sink.writeframes(np.repeat(samples, channels).tobytes())
    return file.getvalue()


def silence(seconds: int, rate: int = 8000) -> bytes:
    """Return silence as FLAC, which compresses it to little."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=rate, layout="mono")
        for _ in range(0, seconds, 60):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 60 * rate), np.int16), format="s16", layout="mono"
            )
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
