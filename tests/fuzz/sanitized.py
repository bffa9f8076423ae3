"""Run tests over native kernels that are compiled with AddressSanitizer and UBSan: `make sanitize`.

    python -m tests.fuzz.sanitized [--variants portable avx2] [PYTEST ARGUMENTS]

The package is overlaid, by links, with one whose kernels are these; it is what the tests import.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sylvan.kernels.build import VARIANTS, build, compiler

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "build" / "sanitized"
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
TESTS = (
    "tests/contract/test_kernels.py",
    "tests/contract/test_kernels_attention.py",
    "tests/contract/test_kernels_ragged.py",
    "tests/contract/test_kernels_fused.py",
    "tests/contract/test_kernels_head.py",
    "tests/contract/test_kernels_lora.py",
    "tests/fuzz/test_kernels.py",
)
OPTIONS = {
    # Python and PyTorch leak on purpose, and free in other libraries what was taken in ours
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def overlay(variants: list[str]) -> Path:
    """The package with sanitised kernels; a folder for `PYTHONPATH`."""
    shutil.rmtree(OVERLAY, ignore_errors=True)
    package = OVERLAY / "src"
    shutil.copytree(ROOT / "src", package, copy_function=os.symlink, ignore=_libraries)
    built = build(
        package / "sylvan" / "kernels" / "lib", {v: f"{VARIANTS[v]} {FLAGS}" for v in variants}
    )
    if built.failures:
        raise SystemExit("\n".join(f"{name}: {why}" for name, why in built.failures.items()))
    return package


def _libraries(folder: str, names: list[str]) -> set[str]:
    ignored = {name for name in names if name == "__pycache__"}
    return ignored | ({"lib"} if folder.endswith("/kernels") else set())


def runtime_of(name: str) -> str:
    """Path of a library of the compiler."""
    found = subprocess.run(
        [compiler() or "g++", f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="*", default=["portable"], choices=list(VARIANTS))
    parser.add_argument("--keep", action="store_true", help="do not compile again")
    args, rest = parser.parse_known_args()
    package = OVERLAY / "src" if args.keep else overlay(args.variants)
    preload = " ".join(map(runtime_of, ("libasan.so", "libubsan.so", "libstdc++.so")))
    environ = {**os.environ, **OPTIONS, "LD_PRELOAD": preload, "PYTHONPATH": f"{package}:{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(rest or TESTS),
    ]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
