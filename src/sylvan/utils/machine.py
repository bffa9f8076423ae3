"""Hardware of this machine: cores, memory, CPU instructions. Never fails; 0 or empty: unknown."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

CPU_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_bf16", "amx_int8"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hardware of a machine; only `available_bytes` changes while a server runs.

    Attributes:
        cpu_name: Name of the CPU, from its vendor.
        features: Instruction sets among `CPU_FEATURES` that the CPU supports.
        cores: CPU cores that this process may use, limited by the quota of its container.
        total_bytes: Memory of the machine, or the limit of its container if that is lower.
        available_bytes: Memory that a new process can use without swapping.
    """

    cpu_name: str
    features: frozenset[str]
    cores: int
    total_bytes: int
    available_bytes: int


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Return the hardware of this machine.

    Args:
        root: Directory with `proc` and `sys`; replaced in tests.
    """
    cpu = _text(root / "proc/cpuinfo")
    total, available = _memory(root)
    return Machine(
        cpu_name=_line(cpu, "model name") or platform.processor() or platform.machine(),
        features=frozenset(_line(cpu, "flags").split()) & frozenset(CPU_FEATURES),
        cores=_cores(root),
        total_bytes=total,
        available_bytes=available,
    )


def _cores(root: Path) -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count() or 1
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _memory(root: Path) -> tuple[int, int]:
    info = _text(root / "proc/meminfo")
    total, available = (_kib(_line(info, name)) for name in ("MemTotal", "MemAvailable"))
    if not total:
        total = available = _physical_bytes()
    for limit_file, used_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _text(root / limit_file).strip(), _text(root / used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total = int(limit)
            available = min(available, max(0, total - int(used)))
    return total, available


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _line(text: str, name: str) -> str:
    """Return the value of the first line `name : value`."""
    for line in text.splitlines():
        key, sign, value = line.partition(":")
        if sign and key.strip() == name:
            return value.strip()
    return ""


def _kib(text: str) -> int:
    number = text.split(" ", 1)[0]
    return int(number) * 1024 if number.isdigit() else 0
