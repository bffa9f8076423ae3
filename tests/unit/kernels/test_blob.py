from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from sylvan.kernels import blob
from sylvan.kernels.blob import BlobError, is_unfinished, read_blob, write_blob


def arrays(*sizes: int) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (4096, 3, 9000, 0, 70), (1, 20_000, 64)])
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_what_was_written_is_read(tmp_path, monkeypatch, sizes, chunk):
    monkeypatch.setattr(blob, "_CHUNK", chunk)
    given = arrays(*sizes)

    size = write_blob(tmp_path / "x", {"name": "é", "list": [1, None]}, given)
    found = read_blob(tmp_path / "x")

    assert (tmp_path / "x").stat().st_size == size
    assert found.about == {"name": "é", "list": [1, None]}
    assert [a.tobytes() for a in found.arrays] == [a.tobytes() for a in given]
    assert all(a.ctypes.data % 64 == 0 for a in found.arrays if a.nbytes)
    assert all(a.ctypes.data % 4096 == found.arrays[0].ctypes.data % 4096
               for a in found.arrays if a.nbytes >= 4096)  # fmt: skip


def test_what_was_read_is_the_readers_own(tmp_path):
    write_blob(tmp_path / "x", {}, arrays(100))
    first, second = read_blob(tmp_path / "x"), read_blob(tmp_path / "x")

    first.arrays[0][:] = 0

    assert second.arrays[0].any()
    assert read_blob(tmp_path / "x").arrays[0].any()


def test_nothing_but_the_file_is_left(tmp_path):
    write_blob(tmp_path / "x", {}, arrays(100))
    write_blob(tmp_path / "x", {}, arrays(7))

    assert os.listdir(tmp_path) == ["x"]
    assert read_blob(tmp_path / "x").arrays[0].nbytes == 7


@pytest.mark.parametrize("where", ["magic", "length", "header", "body", "last"])
def test_a_byte_that_changed_is_noticed(tmp_path, where):
    path = tmp_path / "x"
    write_blob(path, {"a": 1}, arrays(5000, 10))
    data = bytearray(path.read_bytes())
    at = {"magic": 0, "length": 15, "header": 20, "body": 4096 + 17, "last": len(data) - 1}[where]
    data[at] ^= 1
    path.write_bytes(data)

    with pytest.raises(BlobError):
        read_blob(path)


@pytest.mark.parametrize("size", [0, 3, 20, 4095, 5000])
def test_a_file_that_is_cut_off_is_noticed(tmp_path, size):
    path = tmp_path / "x"
    write_blob(path, {}, arrays(5000, 10))
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(BlobError):
        read_blob(path)


def test_arrays_outside_of_the_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(blob, "_places", lambda arrays: ([(95, 10)], 100))
    monkeypatch.setattr(blob, "_sums", lambda *_: [0])
    write_blob(tmp_path / "x", {}, arrays(10))

    with pytest.raises(BlobError, match="ends after the file"):
        read_blob(tmp_path / "x")


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_blob(tmp_path / "x")


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "wb")
file.write(b"half of it")
file.flush()
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_that_another_process_writes_is_left_to_it(tmp_path):
    write_blob(tmp_path / "x", {}, arrays(100))
    draft = tmp_path / ".x.part"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(draft)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(OSError, match="another process") as refused:
            write_blob(tmp_path / "x", {}, arrays(7))
        assert refused.value.errno == errno.EBUSY
        assert not is_unfinished(draft)
        assert draft.read_bytes() == b"half of it"
        assert read_blob(tmp_path / "x").arrays[0].nbytes == 100

        other.kill()
        other.wait()
    assert is_unfinished(draft)

    write_blob(tmp_path / "x", {}, arrays(7))

    assert os.listdir(tmp_path) == ["x"]
    assert read_blob(tmp_path / "x").arrays[0].nbytes == 7


def test_writing_may_be_given_up(tmp_path):
    answers = iter([False, True])

    with pytest.raises(OSError, match="ends"):
        write_blob(tmp_path / "x", {}, arrays(10, 20, 30), lambda: next(answers))

    assert os.listdir(tmp_path) == []


def test_arrays_that_change_meanwhile_make_a_damaged_file(tmp_path):
    first, second = arrays(10, 20)

    def change() -> bool:
        second[:] ^= 1
        return False

    write_blob(tmp_path / "x", {}, [first], lambda: False)
    write_blob(tmp_path / "x", {}, [second], change)

    with pytest.raises(BlobError, match="checksum"):
        read_blob(tmp_path / "x")
