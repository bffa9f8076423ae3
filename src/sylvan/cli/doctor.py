"""`sylvan doctor`: checks everything about this machine that slows a server down or stops it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

from sylvan.cli.check import check_machine, report
from sylvan.cli.finding import Finding
from sylvan.cli.main import Spec, version
from sylvan.cli.settings import load_settings
from sylvan.config.fields import size_text
from sylvan.config.flags import Option, Parsed
from sylvan.config.load_cache import PROGRAM, WEIGHTS, default_directory, load_cache_dir
from sylvan.config.tree import Config
from sylvan.utils.machine import inspect_machine

SPEC = Spec(
    usage="doctor [flags]",
    doc="Check everything about this machine that can slow down or stop a server: the checks of "
    "`sylvan check`, resource limits, memory, power, NUMA, versions. Each finding says what to "
    "change. The exit code is 1 if something needed for serving is missing.",
    options=(Option("json", "Print one JSON object per finding, in a list."),),
    max_positions=0,
)

_FILES = 4096 + 128  # connections of a server, plus other descriptors
_PROCESSES = 1024
_SHM_BYTES = 512 << 20
_VERSIONS = ("numpy", "tokenizers", "safetensors", "uvicorn", "fastapi", "pyzmq", "llguidance")

Limits = Callable[[int], tuple[int, int]]


def run(args: Parsed) -> int:
    config = load_settings(args, position=None).config
    found = [
        *check_machine(inspect_machine(), config.server),
        *check_limits(),
        *check_system(),
        check_load_cache(config),
        *check_versions(),
    ]
    return report(found, as_json=args.has("json"))


def check_limits(limits: Limits = resource.getrlimit) -> Iterable[Finding]:
    """Check the user's resource limits."""
    files, most = limits(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < _FILES
    cost = f"fewer connections than limits.connections: ulimit -n {_FILES}" + (
        "" if most == resource.RLIM_INFINITY or most >= _FILES else ", after the administrator did"
    )
    yield Finding("slow" if few else "ok", "open files", _count(files), cost)
    processes, _ = limits(resource.RLIMIT_NPROC)
    few = processes != resource.RLIM_INFINITY and processes < _PROCESSES
    cost = f"threads cannot be created under load: ulimit -u {_PROCESSES}"
    yield Finding("slow" if few else "ok", "processes", _count(processes), cost)
    space, _ = limits(resource.RLIMIT_AS)
    bounded = space != resource.RLIM_INFINITY
    detail = size_text(space) if bounded else "unlimited"
    cost = "weights that are mapped count: ulimit -v unlimited"
    yield Finding("slow" if bounded else "ok", "address space", detail, cost)


def check_system(root: Path = Path("/")) -> Iterable[Finding]:
    """Check the kernel's settings.

    Args:
        root: Directory with `proc`, `sys` and `dev`, for tests.
    """
    yield Finding("ok", "kernel", _text(root / "proc/sys/kernel/osrelease") or platform.release())
    yield from _huge_pages(root)
    yield from _governor(root)
    yield from _numa(root)
    yield from _memory(root)
    yield from _shared_memory(root)
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope:
        cost = "prefill and decode servers here copy KV twice: kernel.yama.ptrace_scope=0"
        yield Finding("ok" if scope == "0" else "slow", "cross-memory", f"scope {scope}", cost)


def check_load_cache(config: Config) -> Finding:
    """Check whether later starts find what the first one packed."""
    if config.load_cache is None:
        return Finding("ok", "load cache", "off")
    folder = default_directory() if config.load_cache == "auto" else load_cache_dir(config)
    cost = "every start packs the weights again: --load-cache DIR, with a directory you can write"
    if folder is None:
        return Finding("slow", "load cache", "no directory", cost)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Finding("slow", "load cache", f"{folder} is read-only", cost)
    files = folder.iterdir() if folder.is_dir() else ()
    held = sum(file.stat().st_size for file in files if file.suffix in (PROGRAM, WEIGHTS))
    return Finding("ok", "load cache", f"{folder}: {size_text(held)}")


def check_versions() -> Iterable[Finding]:
    """Return the versions that a bug report must contain."""
    yield Finding("ok", "sylvan", version().removeprefix("sylvan "))
    for name in _VERSIONS:
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", name, "not installed", "it is one of sylvan's requirements")


def _huge_pages(root: Path) -> Iterable[Finding]:
    modes = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if not modes:
        return
    chosen = modes.partition("[")[2].partition("]")[0]
    cost = (
        "weights and KV lie in small pages: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    yield Finding("slow" if chosen == "never" else "ok", "huge pages", chosen, cost)


def _governor(root: Path) -> Iterable[Finding]:
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    found = sorted({_text(file) for file in files})
    if not found:
        return
    slow = "powersave" in found and not (root / "sys/devices/system/cpu/intel_pstate").exists()
    cost = "cores run below their maximum clock: cpupower frequency-set -g performance"
    yield Finding("slow" if slow else "ok", "governor", ", ".join(found), cost)


def _numa(root: Path) -> Iterable[Finding]:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    if nodes < 2:
        return
    cost = (
        "threads of one process read memory of the other node: --tp with one rank a node, or one "
        "server a node, each under numactl --cpunodebind=N --membind=N, behind sylvan route"
    )
    yield Finding("slow", "NUMA", f"{nodes} nodes", cost)


def _memory(root: Path) -> Iterable[Finding]:
    mode = _text(root / "proc/sys/vm/overcommit_memory")
    if mode:
        cost = "reserved but unused memory counts: set vm.overcommit_memory=0"
        yield Finding("slow" if mode == "2" else "ok", "overcommit", f"mode {mode}", cost)
    swaps = _text(root / "proc/swaps").splitlines()[1:]
    swappiness = _text(root / "proc/sys/vm/swappiness")
    if swaps and swappiness.isdigit():
        eager = int(swappiness) > 10
        cost = "idle servers lose their weights to the disk: vm.swappiness=10"
        yield Finding("slow" if eager else "ok", "swap", f"swappiness {swappiness}", cost)


def _shared_memory(root: Path) -> Iterable[Finding]:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        cost = "processes pass large messages through files: mount a tmpfs there"
        yield Finding("slow", "/dev/shm", "not there", cost)
        return
    size = found.f_blocks * found.f_frsize
    small = size < _SHM_BYTES
    cost = f"large messages and ranks do not fit: {size_text(_SHM_BYTES)} (docker: --shm-size 1g)"
    yield Finding("slow" if small else "ok", "/dev/shm", size_text(size), cost)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
