"""Compile the native kernels: one library per instruction set, chosen at run time.

The C++ structs of ops are made from `native/opset.py` first. Standard library only: the package's
build hook runs this file before anything is installed. By hand: `python -m sylvan.kernels.build`.
Needs g++ 11 or later.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent
LIB = ROOT / "lib"
_AVX2 = "-march=x86-64-v3"
_AVX512 = (
    "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mprefer-vector-width=512 -mtune=sapphirerapids"
)
_AMX = f"{_AVX512} -mamx-tile -mamx-int8 -mamx-bf16"
# In one library the linker would merge std:: templates, and older CPUs would run AVX512 code.
_X86 = {
    "portable": "",
    "avx2": _AVX2,
    "avxvnni": f"{_AVX2} -mavxvnni",
    "avx512": _AVX512,
    "amx": _AMX,
}
_ARM = {
    "portable": "",
    "neon": "-march=armv8.2-a+dotprod",
    "neonbf16": "-march=armv8.2-a+dotprod+bf16",
}


def variants_of(platform: str) -> Mapping[str, str]:
    """Instruction sets by platform (as `sysconfig` names it), with their compiler flags."""
    if platform.endswith(("x86_64", "amd64")):
        return _X86
    return _ARM if platform.endswith(("aarch64", "arm64")) else {"portable": ""}


# Target platform; `_PYTHON_HOST_PLATFORM` overrides it when cross-compiling.
VARIANTS: Mapping[str, str] = variants_of(sysconfig.get_platform())
# Peeling unrolls loops over a constant number of accumulators, which keeps them in registers.
_FLAGS = (
    "-O2 -fpeel-loops -std=c++20 -fPIC -pthread -ffp-contract=off -fno-math-errno "
    "-fvisibility=hidden -fno-gnu-unique -Wall -Wextra -Wno-psabi -Wno-ignored-attributes "
    "-Wno-unknown-pragmas"
)


@dataclass(frozen=True, slots=True)
class Built:
    """Result of a build: libraries by variant, and errors of the variants that failed."""

    libraries: Mapping[str, Path]
    failures: Mapping[str, str]


def compiler() -> str | None:
    """Path of the C++ compiler (`$CXX` if set), or None."""
    named = os.environ.get("CXX")  # builds have no configuration
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")


def sources() -> list[Path]:
    """Every C++ file of the kernels."""
    return sorted(ROOT.glob("*/*.cpp"))


def build(out: Path = LIB, variants: Mapping[str, str] = VARIANTS) -> Built:
    """Compile all variants, one process each. Variants that an old compiler lacks are left out."""
    cxx = compiler()
    if cxx is None:
        return Built({}, dict.fromkeys(variants, "no C++ compiler (g++) found"))
    out.mkdir(parents=True, exist_ok=True)
    write_header(out)
    running = {
        name: (path, _start(cxx, name, flags, path))
        for name, flags in variants.items()
        for path in [out / f"libsylvan_{name}.so"]
    }
    libraries, failures = {}, {}
    for name, (path, process) in running.items():
        _, errors = process.communicate()
        if process.returncode == 0:
            _temporary(path).replace(path)
            libraries[name] = path
        else:
            failures[name] = errors.strip()
    return Built(libraries, failures)


def write_header(folder: Path) -> Path:
    """Write `ops.h`, the C++ side of the ops, which all sources include."""
    with _bare_packages():
        codegen = importlib.import_module("sylvan.kernels.native.codegen")
        text = codegen.header(importlib.import_module("sylvan.kernels.native.opset").OPS)
    path = folder / "ops.h"
    temporary = path.with_suffix(".h.tmp")
    temporary.write_text(text)
    temporary.replace(path)
    return path


@contextlib.contextmanager
def _bare_packages() -> Iterator[None]:
    """Make modules of `native` importable without the dependencies of the packages above them."""
    names = ("sylvan", "sylvan.kernels", "sylvan.kernels.native")
    if names[-1] in sys.modules:
        yield
        return
    folders = (ROOT.parent, ROOT, ROOT / "native")
    for name, folder in zip(names, folders, strict=True):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(folder)]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sylvan"]:
            del sys.modules[name]


def _temporary(path: Path) -> Path:
    return path.with_suffix(".tmp")


def _start(cxx: str, name: str, flags: str, path: Path) -> subprocess.Popen[str]:
    one_unit = "".join(f'#include "{source}"\n' for source in sources() if _belongs(source, name))
    command = [cxx, *_FLAGS.split(), *flags.split(), f'-DSYLVAN_VARIANT="{name}"', "-shared"]
    command += ["-I", str(path.parent), "-x", "c++", "-", "-o", str(_temporary(path))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(one_unit)
    process.stdin.close()
    process.stdin = None
    return process


def _belongs(source: Path, variant: str) -> bool:
    return source.name != "cpu.cpp" or variant == "portable"


def wheel_tag() -> str:
    """Platform tag of a wheel that holds libraries: no Python ABI, one operating system and CPU."""
    return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def main() -> int:
    """Build all variants and print the result."""
    built = build()
    for name, path in built.libraries.items():
        sys.stdout.write(f"{name}: {path} ({path.stat().st_size >> 10} KiB)\n")
    for name, why in built.failures.items():
        sys.stdout.write(f"{name}: failed: {why}\n")
    return 1 if built.failures else 0


if __name__ == "__main__":
    sys.exit(main())
