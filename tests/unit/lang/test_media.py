from __future__ import annotations

import importlib.util

import pytest

from sylvan.lang.errors import MissingExtraError
from sylvan.lang.media import encode_video
from sylvan.media.encode import encode_image


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


@pytest.mark.skipif(importlib.util.find_spec("cv2") is not None, reason="OpenCV is installed")
def test_videos_name_the_extra_they_need():
    with pytest.raises(MissingExtraError, match=r"sylvan\[video\]"):
        encode_video("v.mp4", 4)
