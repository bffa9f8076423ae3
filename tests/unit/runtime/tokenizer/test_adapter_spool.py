"""Files of adapters that were sent: kept as long as they are read, and no longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sylvan.runtime.tokenizer.adapter_spool import CONFIG, WEIGHTS, AdapterSpool


def test_files_go_with_the_process_unless_they_are_kept(tmp_path: Path) -> None:
    kept, passing = AdapterSpool(tmp_path / "kept"), AdapterSpool(None)
    folders = [spool.write({"r": 4}, b"numbers") for spool in (kept, passing)]

    for folder in folders:
        assert json.loads((folder / CONFIG).read_text()) == {"r": 4}
        assert (folder / WEIGHTS).read_bytes() == b"numbers"
    kept.close()
    passing.close()

    assert folders[0].is_dir()
    assert not folders[1].parent.exists()


def test_only_its_own_directories_are_removed(tmp_path: Path) -> None:
    spool = AdapterSpool(tmp_path / "kept")
    mine, other = spool.write({}, b""), tmp_path / "other"
    other.mkdir()

    for folder in (other, mine):
        spool.remove(str(folder))

    assert other.is_dir()
    assert not mine.exists()


def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch) -> None:
    before = AdapterSpool(tmp_path / "kept")
    used, left = before.write({}, b""), before.write({}, b"")
    monkeypatch.chdir(tmp_path)

    AdapterSpool(Path("kept")).sweep({str(used)})  # the same, spelt otherwise

    assert used.is_dir()
    assert not left.exists()
    AdapterSpool(None).sweep(())
    AdapterSpool(tmp_path / "nowhere").sweep(())


def test_a_configuration_that_is_no_json_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        AdapterSpool(tmp_path / "kept").write({"r": object()}, b"")
    assert not (tmp_path / "kept").exists()
