"""Measures compiled kernels: registers, spills, shared memory, matrix instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from sylvan.kernels.aot.target import ChipTarget

_MATRIX = re.compile(r"\b(wgmma\.mma_async|mma\.sync|v_mfma|v_smfmac)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel for a chip. `spilled`: bytes of stack (CUDA) or registers (ROCm)."""

    kernel: str
    registers: int
    spilled: int
    shared_bytes: int
    matrix: int

    def faults(self, target: ChipTarget) -> list[str]:
        """Reason why the kernel may not be used on `target`; empty if it may."""
        allowed = target.spills.get(self.kernel, 0)
        found = [f"spills {self.spilled}"] if self.spilled > allowed else []
        if self.shared_bytes > target.shared_bytes:
            found.append(
                f"{self.shared_bytes} bytes of shared memory, {target.shared_bytes} allowed"
            )
        return found


def drop_binaries(modules: list[ModuleType]) -> None:
    """Drop the compiled binaries of these modules' kernels."""
    for kernel in _kernels(modules):
        kernel.device_caches.clear()


def compiled(modules: list[ModuleType]) -> list[Compiled]:
    """All binaries compiled since `drop_binaries`."""
    found = []
    for kernel in _kernels(modules):
        for cache in kernel.device_caches.values():
            found += [_measure(binary) for binary in cache[0].values()]
    return found


def _kernels(modules: list[ModuleType]) -> Iterator[Any]:
    seen: set[int] = set()
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, JITFunction) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _measure(binary: Any) -> Compiled:
    if "amdgcn" in binary.asm:
        text = binary.asm["amdgcn"]
        registers, spilled = _field(text, "vgpr_count"), _field(text, "vgpr_spill_count")
    else:
        text = binary.asm["ptx"]
        registers, spilled = _resources(binary.asm["cubin"])
    shared, matrix = int(binary.metadata.shared), len(_MATRIX.findall(text))
    return Compiled(binary.metadata.name.strip("_"), registers, spilled, shared, matrix)


def _field(text: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s*(\d+)", text)
    assert match is not None, name
    return int(match.group(1))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes, as reported by the `cuobjdump` that Triton ships."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    match = _USAGE.search(done.stdout)
    assert match is not None, done.stdout
    return int(match.group(1)), int(match.group(2))
