from __future__ import annotations

import base64

import numpy as np
import pytest

from sylvan.lang.media import encode_video
from sylvan.media.container import video_frames
from sylvan.media.encode import encode_image
from tests.support.media_files import mp4


class Picture:
    def save(self, file, **options):
        file.write(options["format"].encode())


def test_pictures_are_encoded_from_any_source(tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(b"png")
    for source in (str(path), path, b"png", bytearray(b"png")):
        assert encode_image(source) == "cG5n"
    assert encode_image(Picture()) == "UE5H"
    assert encode_image("https://host/p.png") == "https://host/p.png"


def test_unreadable_pictures_are_refused():
    with pytest.raises(OSError, match="no-such"):
        encode_image("no-such.png")
    with pytest.raises(TypeError, match="int"):
        encode_image(3)


def test_frames_of_a_video_are_jpeg_files_one_after_another(tmp_path):
    path = tmp_path / "v.mp4"
    path.write_bytes(mp4(12))
    text = encode_video(str(path), 4)
    assert text.startswith("video:")
    frames = base64.b64decode(text[6:])
    assert frames.count(b"\xff\xd8\xff") == 4
    shown = [float(np.asarray(f).mean()) for f in video_frames(frames, range(4), 1 << 20)]
    assert shown == sorted(shown)
    assert shown[-1] - shown[0] > 200


def test_what_is_no_video_is_refused(tmp_path):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"no video")
    with pytest.raises(OSError, match="could not read a video"):
        encode_video(str(path), 4)
