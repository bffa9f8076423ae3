"""The built web page is that of its sources, and needs nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "ui"
BUILT = ROOT / "src/sylvan/ui/assets"
MADE = ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")


def test_the_built_page_is_that_of_its_sources():
    files = [*(SOURCES / name for name in MADE), *(SOURCES / "src").rglob("*")]
    names = sorted(str(path.relative_to(SOURCES)) for path in files if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (SOURCES / name).read_bytes() + b"\0")

    noted = (BUILT / "sources.sha256").read_text().strip()
    assert digest.hexdigest() == noted, "run: cd ui && npm ci && npm run build"


def test_the_built_page_is_small_and_loads_nothing_from_elsewhere():
    files = {path.name: path.read_text("utf-8") for path in BUILT.iterdir()}

    assert set(files) == {
        *("app.css", "app.js", "icon.svg", "index.html", "licences.txt", "sources.sha256")
    }
    assert sum(len(text) for text in files.values()) < 250_000
    for name in ("app.css", "index.html"):
        assert not re.search(r"https?:|url\(|@import", files[name]), name
    named = {"http://www.w3.org", "https://github.com"}  # namespaces, and where to report a fault
    assert set(re.findall(r"https?://[\w.]+", files["app.js"])) <= named
    for name in ("preact", "marked"):
        assert f"{name} " in files["licences.txt"]


@pytest.mark.slow
@pytest.mark.skipif(not (SOURCES / "node_modules").is_dir(), reason="npm ci was not run in ui/")
def test_building_again_gives_the_same_bytes(tmp_path):
    copy = tmp_path / "ui"
    shutil.copytree(SOURCES, copy, symlinks=True)
    subprocess.run(["npm", "run", "build"], cwd=copy, check=True, timeout=300)

    made = tmp_path / "src/sylvan/ui/assets"
    for path in BUILT.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes(), path.name
