"""Explains why a device cannot be used: checks the driver first, then the installed packages."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OR_CPU = "or choose device=cpu or auto"
_DRIVERS = {12: 525, 13: 580}  # oldest NVIDIA driver by CUDA version, from CUDA's release notes
_NEWEST_CUDA = 13
_OLDEST_JAX = 0, 8, 0
_JAX_START_S = 120
_NVML = "libnvidia-ml.so.1"
_MIN_CAPABILITY = (8, 0)  # of NVIDIA GPUs that Triton supports (its README)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """Version of the installed torch, and the devices that it was built for."""

    version: str = ""  # empty: there is none
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


FindBuild = Callable[[], TorchBuild]
Capability = tuple[int, int]
FindCapability = Callable[[], "Capability | None"]


def find_build() -> TorchBuild:
    """Read torch's version file, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = dict(re.findall(r"^(\w+)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return TorchBuild(
        version=found.get("__version__", "unknown"),
        cuda=found.get("cuda"),
        hip=found.get("hip"),
        xpu=found.get("xpu"),
    )


def nvidia_problem(root: Path, find: FindBuild, newest: FindCapability) -> str | None:
    """Probe CUDA devices; `newest` is the compute capability of the newest one."""
    return _driver_problem(root, find) or _gpu_problem(root, newest)


def _driver_problem(root: Path, find: FindBuild) -> str | None:
    driver = _driver_version(root)
    if driver is None and not (root / "dev/nvidiactl").exists():
        return (
            "no NVIDIA driver is loaded on this machine; install one, until nvidia-smi lists the "
            f"GPU, {OR_CPU}"
        )
    build = find()
    if build.cuda is None:
        return _wrong_build(build, "CUDA", "https://pytorch.org/get-started/locally")
    least = _DRIVERS.get(int(build.cuda.split(".")[0]), _DRIVERS[_NEWEST_CUDA])
    if driver is not None and driver[0] < least:
        return (
            f"the NVIDIA driver {driver[1]} is too old for CUDA {build.cuda} of torch "
            f"{build.version}, which needs {least} or newer; update the driver, install a torch "
            f"for an older CUDA, {OR_CPU}"
        )
    return None


def _gpu_problem(root: Path, newest: FindCapability) -> str | None:
    if not any(root.glob("dev/nvidia[0-9]*")):
        return (
            "the NVIDIA driver shows this process no GPU; check nvidia-smi, and which devices its "
            f"container may use, {OR_CPU}"
        )
    capability = newest()
    if capability is not None and capability < _MIN_CAPABILITY:
        return (
            f"the GPU has compute capability {_dotted(capability)}, and the kernels need "
            f"{_dotted(_MIN_CAPABILITY)} (Ampere) or newer; use a newer GPU, {OR_CPU}"
        )
    return None


def _dotted(capability: Capability) -> str:
    return ".".join(str(number) for number in capability)


def amd_problem(root: Path, find: FindBuild) -> str | None:
    """Probe ROCm devices."""
    if not (root / "dev/kfd").exists():
        return (
            "the AMD driver (amdgpu with /dev/kfd) is not loaded on this machine; install ROCm's "
            f"driver, so that rocminfo lists the GPU, {OR_CPU}"
        )
    build = find()
    if build.hip is None:
        return _wrong_build(build, "ROCm", "https://pytorch.org/get-started/locally")
    if not any(root.glob("dev/dri/renderD*")):
        return (
            "ROCm shows this process no GPU; look at rocminfo, and at the groups video "
            f"and render, {OR_CPU}"
        )
    return None


def intel_problem(root: Path, find: FindBuild) -> str | None:
    """Probe XPU devices."""
    if not any(root.glob("dev/dri/renderD*")):
        return f"there is no Intel GPU with a driver (/dev/dri) here; install the driver, {OR_CPU}"
    build = find()
    if build.xpu is None:
        return _wrong_build(build, "XPU", "https://pytorch.org/get-started/locally")
    return None


def apple_problem(system: str | None = None, machine: str | None = None) -> str | None:
    """Probe the GPU of a Mac; the arguments replace this machine in tests."""
    found = system or platform.system(), machine or platform.machine()
    if found != ("Darwin", "arm64"):
        return (
            f"this machine is not a Mac with Apple silicon ({' '.join(found)}); use one, {OR_CPU}"
        )
    return None


def jax_problem(extra: str, *also: str) -> str | None:
    """Probe the packages of JAX devices: jax, and `also`.

    `extra`: the extra of Sylvan that installs them.
    """
    for name in ("jax", "jaxlib", *also):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"the package {name} is not installed; pip install 'sylvan[{extra}]', {OR_CPU}"
        if name in ("jax", "jaxlib") and _numbers(version) < _OLDEST_JAX:
            oldest = ".".join(map(str, _OLDEST_JAX))
            return (
                f"{name} {version} is too old, {oldest} or newer is needed; pip install --upgrade "
                f"'sylvan[{extra}]', {OR_CPU}"
            )
    return None


def tpu_memory() -> tuple[int, int] | None:
    """Free and total bytes of the first TPU; None: unknown.

    A short-lived process asks, because a TPU belongs to one process at a time, and this process
    does not compute.
    """
    code = (
        "import jax; s = jax.devices('tpu')[0].memory_stats(); "
        "print(s['bytes_limit'] - s['bytes_in_use'], s['bytes_limit'])"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_JAX_START_S
        )
    except subprocess.TimeoutExpired:
        return None
    found = done.stdout.split()
    return (int(found[0]), int(found[1])) if not done.returncode and len(found) == 2 else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _wrong_build(build: TorchBuild, wanted: str, where: str) -> str:
    if not build.version:
        return f"torch is not installed; install its build for {wanted} ({where}), {OR_CPU}"
    return (
        f"the installed torch {build.version} was built without {wanted}; install a build with it "
        f"({where}), {OR_CPU}"
    )


def _driver_version(root: Path) -> tuple[int, str] | None:
    """Major version of the NVIDIA driver, and the whole version; None: unknown."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,})\.\d+(?:\.\d+)?\b", text)
    return (int(found[1]), found[0]) if found else None


def nvidia_memory(name: str = _NVML) -> tuple[int, int] | None:
    """Free and total bytes of the first GPU, from the driver's library NVML; None: unknown.

    Unlike CUDA, NVML allocates no memory on the device.
    """
    numbers = (ctypes.c_uint64 * 3)()  # total, free, used
    with _nvml(name) as (library, devices):
        for device in devices[:1]:
            if not library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(numbers)):
                return numbers[1], numbers[0]
    return None


def nvidia_capability(name: str = _NVML) -> Capability | None:
    """Compute capability of the newest GPU, from NVML; None: unknown."""
    found: list[Capability] = []
    major, minor = ctypes.c_int(), ctypes.c_int()
    with _nvml(name) as (library, devices):
        for device in devices:
            numbers = ctypes.byref(major), ctypes.byref(minor)
            if not library.nvmlDeviceGetCudaComputeCapability(device, *numbers):
                found.append((major.value, minor.value))
    return max(found, default=None)


@contextmanager
def _nvml(name: str) -> Iterator[tuple[Any, list[ctypes.c_void_p]]]:
    """Open NVML; return the library, and handles of all GPUs (none if it does not work)."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        yield None, []
        return
    if library.nvmlInit_v2():
        yield library, []
        return
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        yield (
            library,
            [
                handle
                for index, handle in enumerate(handles)
                if not library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            ],
        )
    finally:
        library.nvmlShutdown()


def amd_memory(root: Path) -> tuple[int, int] | None:
    """Free and total bytes of the first GPU, from files of its driver; None: unknown."""
    for folder in sorted(root.glob("sys/class/drm/card*/device")):
        total, used = (folder / f"mem_info_vram_{name}" for name in ("total", "used"))
        if total.exists() and used.exists():
            size = int(total.read_text())
            return size - int(used.read_text()), size
    return None
