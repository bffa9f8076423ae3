"""The database of files and batches: its owner, its mode, and a disk that is full."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

import pytest

from sylvan.protocol.errors import CapacityError, ConfigError
from sylvan.runtime.server.stores.batches import BatchStore, StoredFile


def stored(name: str, num_bytes: int) -> StoredFile:
    return StoredFile(name, "acme", name, "batch", 0, num_bytes)


def test_stored_objects_are_private(tmp_path):
    (tmp_path / "batches.sqlite").touch(0o644)
    store = BatchStore(str(tmp_path))
    store.files.add(stored("a", 1), b"x")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    store.close()

    assert modes["batches.sqlite"] == modes["batches.sqlite-journal"] == 0o600


def test_a_folder_has_one_server(tmp_path):
    first = BatchStore(str(tmp_path))
    with pytest.raises(ConfigError, match=r"server\.data_dir=.* another server uses it"):
        BatchStore(str(tmp_path))
    first.close()
    BatchStore(str(tmp_path)).close()


def test_another_process_is_another_server(tmp_path):
    store = BatchStore(str(tmp_path))
    code = (
        "import sys; from sylvan.runtime.server.stores.batches import BatchStore; "
        "BatchStore(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    store.close()

    assert done.returncode != 0
    assert "another server uses it" in done.stderr


@pytest.mark.parametrize("folder", ["/dev/null", "/proc/none"])
def test_a_folder_that_cannot_be_one_is_refused(folder):
    with pytest.raises(ConfigError, match=rf"server\.data_dir={folder} cannot be used"):
        BatchStore(folder)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root mounts a disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_deleting_makes_room_on_a_full_disk(small_disk):
    store = BatchStore(str(small_disk))
    contents = {f"f{i}": os.urandom(400_000) for i in range(4)}
    for name, content in contents.items():
        store.files.add(stored(name, len(content)), content)
    state = {"id": "b", "status": "in_progress", "created_at": 0}
    store.add_batch("acme", state)
    with (small_disk / "other").open("wb", buffering=0) as other:  # of another program
        try:
            while True:
                other.write(bytes(4096))
        except OSError:
            pass
    with pytest.raises(CapacityError, match="disk is full") as refused:
        store.files.add(stored("late", 600_000), bytes(600_000))
    assert refused.value.status == 507
    store.save_batch("acme", {**state, "status": "cancelling"})
    store.files.delete("f1")
    store.files.delete("f2")
    late = os.urandom(600_000)
    store.files.add(stored("late", len(late)), late)  # where others were

    assert {file.id for file in store.files.list("acme", None)} == {"f0", "f3", "late"}
    assert store.files.content("late") == late
    assert store.files.content("f0") == contents["f0"]
    assert store.files.content("f3") == contents["f3"]
    assert [state["status"] for _, state in store.unfinished()] == ["cancelling"]
    store.close()
    again = BatchStore(str(small_disk))  # as after a restart, still without room
    assert again.files.content("late") == late
    again.close()
