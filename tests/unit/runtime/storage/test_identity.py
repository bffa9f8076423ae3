"""Whether two folders have the same checkpoint, without reading all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sylvan.runtime.storage.identity import quick_digest

LARGE = 6 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    (path / "small.safetensors").write_bytes(bytes(range(256)) * 4096)
    (path / "large.safetensors").write_bytes(bytes(LARGE))
    return path


def overwrite(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def test_copies_are_the_same_checkpoint(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("no weights")

    assert quick_digest(copy) == quick_digest(folder)


@pytest.mark.parametrize(
    ("name", "place", "data"),
    [
        ("config.json", 17, b"5"),
        ("small.safetensors", 500_000, b"X"),
        ("large.safetensors", 0, b"X"),
        ("large.safetensors", LARGE - 1, b"X"),
        ("large.safetensors", LARGE // 2, b"X" * (1 << 17)),  # a small matrix
    ],
)
def test_another_byte_or_matrix_is_another_checkpoint(
    folder: Path, name: str, place: int, data: bytes
) -> None:
    before = quick_digest(folder)
    overwrite(folder / name, place, data)

    assert quick_digest(folder) != before


def test_a_file_of_another_name_or_size_is_another_checkpoint(folder: Path) -> None:
    before = quick_digest(folder)
    (folder / "large.safetensors").rename(folder / "other.safetensors")
    renamed = quick_digest(folder)
    with (folder / "other.safetensors").open("ab") as file:
        file.write(b"X")

    assert len({before, renamed, quick_digest(folder)}) == 3
