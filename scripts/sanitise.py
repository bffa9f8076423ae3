"""Runs tests with native kernels that are compiled with AddressSanitizer and UBSan.

    python scripts/sanitise.py [--variant avx2 ...] [PYTEST ARGUMENT ...]

Copies the package to `build/sanitised`, compiles its kernels there with both sanitizers, and runs
the kernels' contract tests, the corpora of the fuzzers and extreme requests with that copy, for
each instruction set that this machine has. Any report ends the test process with an error. Leaks
are not checked, because Python frees much only at exit. Linux with GCC.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "sanitised"
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
TESTS = (
    *sorted(str(path) for path in (ROOT / "tests" / "contract").glob("test_kernels*.py")),
    str(ROOT / "tests" / "fuzz"),
)


def runtime(name: str) -> str:
    """Path of a sanitizer's runtime, which the interpreter must load before anything else."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"GCC has no {name}: install libasan and libubsan of its version")
    return found


def main() -> int:
    """Build and test; return the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", action="append")
    args, rest = parser.parse_known_args()
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(ROOT / "src" / "sylvan", COPY / "sylvan", ignore=ignored)

    from sylvan.kernels.build import VARIANTS, build
    from sylvan.kernels.native.library import usable

    known = [name for name, obstacle in usable().items() if not obstacle]
    names = args.variant or known
    if unknown := set(names) - set(known):
        parser.error(f"this machine cannot run {', '.join(sorted(unknown))}: {', '.join(known)}")
    lib = COPY / "sylvan" / "kernels" / "lib"
    built = build(lib, {name: f"{VARIANTS[name]} {FLAGS}" for name in {*names, "portable"}})
    for name, failure in built.failures.items():
        print(f"{name}: {failure}", file=sys.stderr)
    if built.failures:
        return 1
    settings = {
        "PYTHONPATH": f"{COPY}{os.pathsep}{ROOT}",
        "PYTHONMALLOC": "malloc",  # so that its arrays have guarded ends, too
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = ["env", *(f"{name}={value}" for name, value in settings.items())]
    command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(rest or TESTS)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
