"""Write the locked requirements of images, with the hash of every file.

python scripts/lock_requirements.py [--upgrade] [--find-links DIR]

Needs `uv`. `deploy/requirements/cpu.txt` names the build of PyTorch without CUDA, which is on
PyTorch's own index; `--find-links` names a directory that has its wheel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/requirements"
EXTRAS = ("grpc", "jwt", "trace", "kubernetes", "gguf", "remote", "s3", "redis")
TORCH = {"cpu": "torch==2.13.0+cpu", "cuda": "torch==2.13.0"}
PYTHON = "3.11"  # of the images: Debian 12
HEAD = "# Made by: python scripts/lock_requirements.py\n"
NOTE = {
    "cpu": "# PyTorch without CUDA: add --extra-index-url https://download.pytorch.org/whl/cpu\n",
    "cuda": "",
}


def lock(kind: str, *, upgrade: bool, links: str | None) -> None:
    """Lock the requirements of one file."""
    out = FOLDER / f"{kind}.txt"
    command = ["uv", "pip", "compile", "pyproject.toml", "-", "--generate-hashes", "--quiet"]
    command += ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
    command += [word for name in EXTRAS for word in ("--extra", name)]
    command += ["--output-file", str(out), "--no-emit-find-links", "--no-header"]
    command += ["--upgrade"] if upgrade else []
    command += ["--find-links", links] if links and kind == "cpu" else []
    if kind == "cuda":
        command += ["--extra", "gpu"]
    subprocess.run(command, cwd=ROOT, input=TORCH[kind], text=True, check=True)
    out.write_text(HEAD + NOTE[kind] + out.read_text())


def lock_build(*, upgrade: bool) -> None:
    """Lock the packages that build the wheel in an image."""
    out = FOLDER / "build.txt"
    command = ["uv", "pip", "compile", "-", "--generate-hashes", "--quiet", "--no-header"]
    command += ["--python-version", PYTHON, "--output-file", str(out)]
    command += ["--upgrade"] if upgrade else []
    subprocess.run(command, cwd=ROOT, input="build\nhatchling>=1.25", text=True, check=True)
    out.write_text(HEAD + out.read_text())


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take newer releases")
    parser.add_argument("--find-links", metavar="DIR")
    args = parser.parse_args()
    lock_build(upgrade=args.upgrade)
    for kind in TORCH:
        lock(kind, upgrade=args.upgrade, links=args.find_links)
    return 0


if __name__ == "__main__":
    sys.exit(main())
