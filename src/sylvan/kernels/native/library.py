"""Finds the compiled kernels and picks the variant this CPU can run. Loads no torch."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sylvan.kernels.native.binding import OP, Constants, PackedRows, PagedBytes, StepInputs, StepRun
from sylvan.kernels.native.codegen import digest
from sylvan.kernels.native.opset import OPS
from sylvan.kernels.native.sampling import ForcedTokens, SampleRows, SampleSlots

LIB = Path(__file__).parents[1] / "lib"
_AVX2, _AVX512, _VNNI, _BF16, _AMX, _AVX_VNNI, _DOT, _ARM_BF16 = (1 << i for i in range(8))
_NEEDS: Mapping[str, int] = {
    "portable": 0,
    "avx2": _AVX2,
    "avxvnni": _AVX2 | _AVX_VNNI,
    "avx512": _AVX2 | _AVX512 | _VNNI | _BF16,
    "amx": _AVX2 | _AVX512 | _VNNI | _BF16 | _AMX,
    "neon": _DOT,
    "neonbf16": _DOT | _ARM_BF16,
}
_FEATURES = ("avx2", "avx512", "avx512-vnni", "avx512-bf16", "amx", "avx-vnni", "dotprod", "bf16")
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_ARM = ("neonbf16", "neon", "portable")
_X86 = ("amx", "avx512", "avxvnni", "avx2", "portable")
PREFERENCE = _ARM if _IS_ARM else _X86
"""Variants of this kind of CPU, best first."""


class LibraryMissing(Exception):  # noqa: N818 - a state of the installation, answered by a fallback
    """No compiled kernels can be used on this machine; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded variant and its sizes."""

    variant: str
    path: Path
    dll: ctypes.CDLL
    constants: Constants


@dataclass(frozen=True, slots=True)
class Description:
    """The library selected on this machine and why; `lines` is for display."""

    variant: str | None
    cpu_features: tuple[str, ...]
    reasons: Mapping[str, str]  # variant -> "in use", or why not

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for the CPU and one for each variant."""
        found = ", ".join(self.cpu_features) or "none of those with kernels"
        return (
            f"cpu: {platform.machine()}; instruction sets: {found}",
            *(f"{name}: {why}" for name, why in self.reasons.items()),
        )


def cpu_features(folder: Path = LIB) -> tuple[str, ...]:
    """Return the instruction sets of CPU and operating system for which there are kernels.

    Raises:
        LibraryMissing: nothing is compiled.
    """
    bits = _cpu_bits(folder)
    return tuple(name for i, name in enumerate(_FEATURES) if bits >> i & 1)


def usable(folder: Path = LIB) -> Mapping[str, str]:
    """Return why each variant cannot be used, best first; "" if it can."""
    bits = _cpu_bits(folder)
    return {name: _unusable_reason(folder, name, bits) for name in PREFERENCE}


@functools.cache
def load(variant: str | None = None, folder: Path = LIB) -> Library:
    """Load a variant, or the best one that works here.

    Raises:
        LibraryMissing: no library is compiled, or the requested variant cannot run.
    """
    obstacles = usable(folder)
    if variant is not None and variant not in obstacles:
        raise LibraryMissing(f"unknown variant {variant!r}; expected {', '.join(PREFERENCE)}")
    names = [variant] if variant else [name for name, why in obstacles.items() if not why]
    for name in names:
        if obstacles[name]:
            raise LibraryMissing(f"the kernels for {name} cannot be used: {obstacles[name]}")
        return _open(folder, name)
    raise LibraryMissing("no compiled kernels can run here")


def describe(folder: Path = LIB) -> Description:
    """The selected library and why; never raises."""
    try:
        reasons = usable(folder)
        best = load(folder=folder).variant
    except LibraryMissing as why:
        return Description(None, (), {"none": str(why)})
    status = {
        name: "in use" if name == best else reason or f"works here, but {best} is faster"
        for name, reason in reasons.items()
    }
    return Description(best, cpu_features(folder), status)


def _path(folder: Path, name: str) -> Path:
    return folder / f"libsylvan_{name}.so"


def _cpu_bits(folder: Path) -> int:
    path = _path(folder, "portable")
    if not path.exists():
        raise LibraryMissing(
            "the C++ kernels are not compiled (no g++ when Sylvan was installed?); "
            "install g++ and run: python -m sylvan.kernels.build"
        )
    try:
        return int(ctypes.CDLL(str(path)).sylvan_cpu())
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"{path.name} cannot be loaded: {error}") from None


def _unusable_reason(folder: Path, name: str, bits: int) -> str:
    lacking = [f for i, f in enumerate(_FEATURES) if _NEEDS[name] & ~bits & 1 << i]
    if lacking:
        return f"this CPU or its operating system lacks {', '.join(lacking)}"
    if not _path(folder, name).exists():
        return "not compiled"
    try:
        dll = ctypes.CDLL(str(_path(folder, name)))
        if _is_stale(dll):
            return "compiled from other sources; run: python -m sylvan.kernels.build"
        return "the operating system denies access to tile registers" if dll.sylvan_start() else ""
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"


@functools.cache
def ops_digest() -> str:
    """Digest of the ops that programs use."""
    return digest(OPS)


def _is_stale(dll: ctypes.CDLL) -> bool:
    """Whether the library was built from other op definitions than this package's."""
    newest = (
        "sylvan_ops_digest",
        "sylvan_pack_rows",
        "sylvan_ngram_match",
        "sylvan_run_in_background",
        "sylvan_program_check",
    )
    if not all(hasattr(dll, name) for name in newest):
        return True
    dll.sylvan_ops_digest.restype = ctypes.c_char_p
    mirrors = (StepRun, StepInputs, SampleSlots, SampleRows, ForcedTokens, PagedBytes, PackedRows)
    sizes = [OP.itemsize, *(ctypes.sizeof(mirror) for mirror in mirrors)]
    return (
        dll.sylvan_ops_digest().decode() != ops_digest()
        or [dll.sylvan_size(i) for i in range(len(sizes))] != sizes
    )


def _open(folder: Path, name: str) -> Library:
    path = _path(folder, name)
    dll = ctypes.CDLL(str(path))
    dll.sylvan_program_new.restype = ctypes.c_void_p
    dll.sylvan_program_new.argtypes = [ctypes.c_void_p, ctypes.c_int] * 2
    dll.sylvan_program_check.argtypes = [
        *([ctypes.c_void_p, ctypes.c_int] * 2),
        *([ctypes.c_int] * 2),
        *(ctypes.c_char_p, ctypes.c_int),
    ]
    dll.sylvan_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    dll.sylvan_program_bind.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    dll.sylvan_program_bind.restype = None
    dll.sylvan_program_free.argtypes = [ctypes.c_void_p]
    dll.sylvan_program_free.restype = None
    dll.sylvan_run_in_background.argtypes = [ctypes.c_void_p]
    dll.sylvan_run_in_background.restype = None
    dll.sylvan_threads.restype = None
    dll.sylvan_background_threads.restype = None
    dll.sylvan_sample.argtypes = [ctypes.c_void_p]
    dll.sylvan_logprobs.argtypes = [ctypes.c_void_p]
    dll.sylvan_logprobs.restype = None
    copied = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    for copy, more in (("gather", 1), ("scatter", 1), ("copy", 0)):
        function = getattr(dll, f"sylvan_{copy}_pages")
        function.argtypes = copied + [ctypes.c_void_p] * more
        function.restype = None
    dll.sylvan_pack_rows.argtypes = [ctypes.c_void_p]
    dll.sylvan_all_finite.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    return Library(name, path, dll, Constants(*(dll.sylvan_constant(i) for i in range(6))))
