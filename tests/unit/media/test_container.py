"""Video and audio files: accepted streams, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.media.container import sound_samples, video_facts, video_frames
from sylvan.media.images import UnreadableError
from tests.support.media_files import mp4, silence, wav


def brightness(image) -> float:
    return float(np.asarray(image).mean())


def test_frames_are_those_that_are_wanted():
    data = mp4(12, 6)
    facts = video_facts(data, 1 << 20, 60)
    assert (facts.count, facts.fps, facts.width, facts.height) == (12, 6, 64, 48)
    assert facts.seconds == 2
    every = [brightness(f) for f in video_frames(data, range(12), 1 << 20)]
    assert every == sorted(every)
    some = [brightness(f) for f in video_frames(data, [0, 5, 5, 11], 1 << 20)]
    assert some == [every[0], every[5], every[5], every[11]]
    beyond = [brightness(f) for f in video_frames(data, [10, 20, 30], 1 << 20)]
    assert beyond == [every[10], every[11], every[11]]


@pytest.mark.parametrize(
    ("data", "most", "words"),
    [
        (b"no video", (1 << 20, 60), "the video cannot be decoded"),
        (b"", (1 << 20, 60), "the video cannot be decoded"),
        (mp4()[:400], (1 << 20, 60), "read|decoded|frames"),
        (mp4(0), (1 << 20, 60), "read|decoded|frames|track"),
        (wav(), (1 << 20, 60), "no video track"),
        (mp4(), (64 * 47, 60), "media.pixels"),
        (mp4(12, 6), (1 << 20, 1.5), "media.seconds"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", (1 << 20, 60), "read|decoded"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", (1 << 20, 60), "read|decoded"),
    ],
)
def test_bad_videos_are_refused(data, most, words):
    with pytest.raises(UnreadableError, match=words):
        video_facts(data, *most)


def test_a_sound_is_mixed_and_resampled():
    for rate, channels in ((16000, 1), (16000, 2), (44100, 2), (8000, 1)):
        samples = sound_samples(wav(0.5, rate, channels), 16000, 60)
        assert samples.dtype == np.float32
        assert abs(len(samples) - 8000) <= 64
        middle = samples[2000:6000]
        assert 0.3 < float(np.sqrt(np.mean(middle**2))) < 0.4  # of a tone of half the height
        crossings = np.count_nonzero(np.diff(np.signbit(middle)))
        assert abs(crossings - 2 * 440 * 0.25) <= 4


@pytest.mark.parametrize(
    ("data", "seconds", "words"),
    [
        (b"no sound", 60, "the sound cannot be decoded"),
        (mp4(), 60, "no audio track"),
        (wav(0.0), 60, "no audio track"),
        (wav(2.0), 1, "media.seconds"),
    ],
)
def test_bad_sounds_are_refused(data, seconds, words):
    with pytest.raises(UnreadableError, match=words):
        sound_samples(data, 16000, seconds)


@pytest.mark.slow
def test_three_hours_of_sound_are_refused_after_one():
    data = silence(3 * 3600)
    assert len(data) < 4 << 20
    with pytest.raises(UnreadableError, match=r"media\.seconds"):
        sound_samples(data, 16000, 3600)
    assert len(sound_samples(silence(120), 16000, 3600)) == pytest.approx(120 * 16000, abs=64)
