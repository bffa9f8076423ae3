from __future__ import annotations

from pathlib import Path

from sylvan.transport.workspace import Workspace, sweep


def test_a_workspace_is_private_and_goes_with_its_owner(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    (workspace.path / "a1-2").write_bytes(b"x")
    assert workspace.path.stat().st_mode & 0o777 == 0o700
    assert workspace.address("s") == f"ipc://{workspace.path}/s"

    workspace.remove()
    workspace.remove()

    assert not list(tmp_path.iterdir())


def test_a_sweep_takes_only_what_has_lost_its_owner(tmp_path: Path) -> None:
    living, dead = Workspace.create(tmp_path), Workspace.create(tmp_path)
    dead._lock_fd = _closed(dead)
    (tmp_path / "sylvan-without-lock").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "sylvan-link").symlink_to(tmp_path / "other")

    assert sweep(tmp_path) == 1

    names = {path.name for path in tmp_path.iterdir()}
    assert names == {living.path.name, "sylvan-without-lock", "other", "sylvan-link"}
    living.remove()


def test_arrays_of_one_process_are_swept(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    for name in ("a12-0", "a12-77", "a1-0", "a123-0"):
        (workspace.path / name).touch()

    workspace.sweep_arrays(12)

    assert {p.name for p in workspace.path.glob("a*")} == {"a1-0", "a123-0"}
    workspace.remove()


def _closed(workspace: Workspace) -> None:
    import os

    assert workspace._lock_fd is not None
    os.close(workspace._lock_fd)
