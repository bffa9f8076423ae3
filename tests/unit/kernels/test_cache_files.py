"""The directory of files for later starts: bounded, and shared."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sylvan.kernels import cache_files
from sylvan.kernels.blob import read_blob
from sylvan.kernels.cache_files import CacheFiles

KIB, GIB = 1 << 10, 1 << 30


def block(kib: int) -> list[np.ndarray]:
    return [np.full(kib * KIB, 7, np.uint8)]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def aged(folder: Path, *order: str) -> None:
    """Make files look as if they were used in this order."""
    for number, name in enumerate(order):
        os.utime(folder / name, (number + 1, number + 1))


@pytest.fixture
def disk(monkeypatch):
    """Says how large the disk is, and what else is on it, in bytes."""

    def set_up(total: int, others: int = 0) -> None:
        def usage(folder: Path) -> Any:
            held = sum(f.stat().st_size for f in folder.iterdir() if f.suffix != ".txt")
            return shutil._ntuple_diskusage(total, held + others, total - held - others)

        monkeypatch.setattr(cache_files.shutil, "disk_usage", usage)

    return set_up


def test_what_was_not_used_for_longest_goes_first(tmp_path, disk):
    disk(400 * GIB)
    files = CacheFiles(tmp_path / "a" / "b", 100 * KIB / (400 * GIB))
    files.write("old.weights", {}, block(20))
    files.write("older.program", {}, block(20))
    files.write("new.weights", {}, block(20))
    aged(files.folder, "older.program", "old.weights", "new.weights")

    files.write("newest.weights", {}, block(40))

    assert names(files.folder) == ["new.weights", "newest.weights", "old.weights"]
    aged(files.folder, "new.weights", "old.weights", "newest.weights")
    files.used("new.weights")

    files.write("x.weights", {}, block(30))

    assert names(files.folder) == ["new.weights", "newest.weights", "x.weights"]


def test_all_files_together_stay_below_their_share(tmp_path, disk):
    disk(400 * GIB)
    files = CacheFiles(tmp_path, 200 * KIB / (400 * GIB))
    for number in range(12):
        name = f"{number:02}.weights"
        files.write(name, {}, block(15 + 5 * (number % 3)))
        aged(tmp_path, *names(tmp_path))
        header = 4 * KIB
        assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 200 * KIB + header
        assert names(tmp_path)[-1] == name


def test_a_file_takes_its_own_place(tmp_path, disk):
    disk(400 * GIB)
    files = CacheFiles(tmp_path, 100 * KIB / (400 * GIB))
    files.write("a.weights", {}, block(40))
    files.write("b.weights", {}, block(40))

    files.write("b.weights", {}, block(45))

    assert names(tmp_path) == ["a.weights", "b.weights"]


def test_what_is_too_large_costs_nothing_else(tmp_path, disk):
    disk(400 * GIB)
    files = CacheFiles(tmp_path, 100 * KIB / (400 * GIB))
    files.write("a.weights", {}, block(40))

    with pytest.raises(OSError, match=r"103,424 bytes; the cache has room for 102,400"):
        files.write("b.weights", {}, block(101))

    assert names(tmp_path) == ["a.weights"]


@pytest.mark.parametrize(("total_gib", "spare_gib"), [(10, 1), (40, 2), (1000, 4)])
def test_a_part_of_the_disk_stays_free(tmp_path, disk, total_gib, spare_gib):
    """Files of others are not deleted; our own make room."""
    files = CacheFiles(tmp_path)
    disk(total_gib * GIB, others=(total_gib - spare_gib) * GIB - 50 * KIB)
    files.write("a.weights", {}, block(30))
    files.write("b.weights", {}, block(40))
    assert names(tmp_path) == ["b.weights"]

    with pytest.raises(OSError, match="the cache has room for"):
        files.write("c.weights", {}, block(51))

    assert names(tmp_path) == ["b.weights"]


def test_what_others_keep_there_is_left_alone(tmp_path, disk):
    disk(400 * GIB)
    (tmp_path / "notes.txt").write_bytes(bytes(99 * KIB))
    (tmp_path / "folder").mkdir()
    files = CacheFiles(tmp_path, 50 * KIB / (400 * GIB))
    files.write("a.weights", {}, block(30))
    (tmp_path / ".b.weights.part").write_bytes(b"a start that was killed")

    files.write("c.weights", {}, block(30))

    assert names(tmp_path) == ["c.weights", "folder", "notes.txt"]


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    files = CacheFiles(tmp_path)
    contents = [np.full(50 * KIB, number, np.uint8) for number in range(4)]
    whole = {content.tobytes() for content in contents}
    found: set[bytes] = set()
    refusals: set[int | None] = set()

    def write(number: int) -> int:
        left_to_others = 0
        for _ in range(40):
            try:
                files.write("a.weights", {}, [contents[number]])
            except OSError as error:
                refusals.add(error.errno)
                left_to_others += 1
            with contextlib.suppress(FileNotFoundError):
                found.add(read_blob(tmp_path / "a.weights").arrays[0].tobytes())
        return left_to_others

    with ThreadPoolExecutor(4) as threads:
        left_to_others = sum(threads.map(write, range(4)))

    assert left_to_others < 160
    assert found <= whole
    assert refusals <= {errno.EBUSY, errno.ENOENT}
    assert names(tmp_path) == ["a.weights"]
