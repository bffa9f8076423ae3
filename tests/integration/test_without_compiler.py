"""The package as built and installed: with its kernels, and where nothing can compile them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sylvan
from sylvan.kernels.build import VARIANTS, compiler
from tests.support.tiny import write_model

ROOT = Path(__file__).parents[2]
WHEELS = pytest.mark.skipif(
    "BUILD_WHEELS" not in os.environ,
    reason="BUILD_WHEELS is not set: it compiles for minutes, and fetches the build's requirements",
)
NEEDED = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
SERVE = """
import json, sys
import sylvan
flags = {"load_format": "dummy", "device": "cpu", "threads": 1, "max_total_tokens": 1024}
with sylvan.Engine(model_path=sys.argv[1], processes="one", **flags) as engine:
    reply = engine.generate("hello", {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True})
    facts = engine.get_server_info()["extra"]
found = {"ids": reply["output_ids"], "facts": facts, "package": sylvan.__file__}
print(json.dumps(found))
"""


def served(package: Path, tmp_path: Path) -> tuple[dict[str, object], list[str]]:
    """The answer of an engine installed in such a directory, and its warnings about kernels."""
    run = subprocess.run(
        [sys.executable, "-c", SERVE, str(write_model(tmp_path / "model"))],
        env=os.environ | {"PYTHONPATH": str(package)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert Path(found["package"]).is_relative_to(package)
    return found, [line for line in run.stderr.splitlines() if "kernels" in line]


def sources(folder: Path) -> Path:
    """A copy of what the package is built from, without what was compiled in place."""
    package = Path(sylvan.__file__).parent
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(package, folder / "src" / "sylvan", ignore=ignored)
    for name in NEEDED:
        shutil.copy(ROOT / name, folder)
    return folder


def wheel(source: Path, out: Path, path: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(out), str(source)]
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True, timeout=600)
    return next(out.glob("sylvan-*.whl"))


def check_degraded(package: Path, tmp_path: Path) -> None:
    found, warnings = served(package, tmp_path)
    facts = found["facts"]

    assert isinstance(facts, dict)
    assert isinstance(found["ids"], list)
    assert len(found["ids"]) == 6
    assert (facts["runner"], facts["deterministic"]) == ("eager", False)
    assert len(warnings) == 1, warnings
    assert "the C++ kernels are not compiled" in warnings[0]
    assert "python -m sylvan.kernels.build" in warnings[0]


@pytest.mark.slow
def test_without_compiled_kernels_one_warning_and_answers_by_pytorch(tmp_path):
    check_degraded(sources(tmp_path) / "src", tmp_path)


@WHEELS
@pytest.mark.slow
@pytest.mark.network
def test_a_wheel_is_built_without_a_compiler_and_serves(tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()

    built = wheel(sources(tmp_path / "source"), tmp_path / "out", str(empty))

    assert built.name.endswith("-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    check_degraded(tmp_path / "installed", tmp_path)


@WHEELS
@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_a_wheel_holds_the_kernels_and_serves_with_them(tmp_path):
    given = os.environ.get("BUILT_WHEEL")  # one that was made just now
    path = os.environ["PATH"]
    built = Path(given) if given else wheel(sources(tmp_path / "source"), tmp_path / "out", path)

    assert not built.name.endswith("-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        libraries = {Path(n).name for n in archive.namelist() if n.endswith(".so")}
        archive.extractall(tmp_path / "installed")
    assert libraries == {f"libsylvan_{name}.so" for name in VARIANTS}
    found, warnings = served(tmp_path / "installed", tmp_path)
    assert str(found["facts"]["runner"]).startswith("program")
    assert not warnings
