"""`sylvan cache`: what operators see of a store, and do to it."""

from __future__ import annotations

import tarfile

import pytest

from sylvan.cli.main import main
from sylvan.runtime.storage.api import StoreLimits
from sylvan.runtime.storage.backends.file import FileStore
from sylvan.runtime.storage.manifest import bind
from sylvan.runtime.storage.record import RecordCodec
from sylvan.utils.clock import VirtualClock
from tests.support.stores import manifest, name_of

RECORDS = RecordCodec(manifest().identity)


@pytest.fixture
def folder(tmp_path):
    """Three pages, an hour between each of them."""
    clock = VirtualClock(1.7e9)
    store = FileStore(tmp_path / "kv", StoreLimits(), clock)
    bind(store, manifest(), "here")
    for number in range(3):
        clock.advance(3600)
        name = name_of(number, space=number % 2, kind="kv" if number else "state")
        store.write(name, RECORDS.encode(name, bytes([number]) * 1000))
    store.close()
    return tmp_path / "kv"


def cache(capsys, *words):
    code = main(["cache", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def spoil(folder, number=1):
    path = next((folder / "pages").glob(f"*/*/{number:064x}.*"))
    path.write_bytes(path.read_bytes()[:-1])


def test_ls_shows_pages_by_namespace(folder, capsys):
    code, text = cache(capsys, "ls", folder)
    assert code == 0
    assert "3 pages" in text
    assert "for weights w, float32" in text
    assert f"{0:016x}" in text
    assert "1 kv, 1 state" in text
    assert "2023-11-1" in text


def test_verify_finds_wrong_pages_and_removes_them(folder, capsys):
    assert cache(capsys, "verify", folder) == (0, "3 pages are right\n")
    spoil(folder)
    code, text = cache(capsys, "verify", folder)
    assert code == 1
    assert "2 pages are right" in text
    assert "1 are torn" in text
    code, text = cache(capsys, "verify", folder, "--remove")
    assert code == 0
    assert cache(capsys, "verify", folder) == (0, "2 pages are right\n")


def test_prune_keeps_the_newest(folder, capsys):
    (folder / "incoming" / "999999999-1-1").write_bytes(b"left over")
    assert cache(capsys, "prune", folder) == (0, "1 removed\n")
    assert cache(capsys, "prune", folder, "--max-bytes", "2200")[1] == "1 removed\n"
    assert not [*(folder / "pages").glob(f"*/*/{0:064x}.*")]
    assert cache(capsys, "prune", folder, "--unused-for", "24")[1] == "2 removed\n"
    assert cache(capsys, "prune", folder, "--all")[0] == 0
    assert not (folder / "manifest.json").exists()


def test_pages_travel_in_a_tar_file(folder, tmp_path, capsys):
    spoil(folder)
    file, other = tmp_path / "kv.tar", tmp_path / "other"
    assert cache(capsys, "export", folder, file) == (0, f"{file}: 2 pages\n")
    assert cache(capsys, "import", other, file) == (0, "2 pages\n")
    assert cache(capsys, "import", other, file) == (0, "2 pages\n")
    assert cache(capsys, "verify", other) == (0, "2 pages are right\n")

    store = FileStore(tmp_path / "third", StoreLimits())
    bind(store, manifest(weights="x"), "there")
    store.close()
    code, text = cache(capsys, "import", tmp_path / "third", file)
    assert code == 2
    assert "weights is x, not w" in text


def test_bad_input_is_named(folder, tmp_path, capsys):
    odd = tmp_path / "odd.tar"
    with tarfile.open(odd, "w") as archive:
        archive.add(__file__, "elsewhere")
    (tmp_path / "text").write_text("no archive")
    cases = [
        (("ls", tmp_path), "not a store of KV pages"),
        (("ls",), "usage: sylvan cache"),
        (("grow", folder), "usage: sylvan cache"),
        (("prune", folder, "--max-bytes", "much"), "--max-bytes"),
        (("prune", folder, "--unused-for", "ever"), "--unused-for"),
        (("export", folder, tmp_path / "none" / "x.tar"), "cannot be written"),
        (("import", tmp_path / "new", odd), "not made by `sylvan cache export`"),
        (("import", tmp_path / "new", tmp_path / "text"), "cannot be read"),
        (("ls", "redis://127.0.0.1:1/0"), "Redis"),
    ]
    for words, why in cases:
        code, text = cache(capsys, *words)
        assert (code, why in text) == (2, True), (words, text)
