"""Why a GPU cannot be used: the driver first, then the installed torch; never a stack trace."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ELSE = "or choose device=cpu or auto"
_DRIVERS = {12: 525, 13: 580}  # oldest NVIDIA driver of each CUDA, from its release notes
_NEWEST_CUDA = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """The installed torch: its version, what it was built for, and what it finds here."""

    version: str = ""  # empty: there is none
    cuda: str | None = None
    hip: str | None = None
    xpu: bool = False
    devices: int = 0  # of the kind it was built for


FindBuild = Callable[[], Build]


def find_build() -> Build:
    """Ask torch, which takes a second or two to import."""
    if importlib.util.find_spec("torch") is None:
        return Build()
    import torch  # only now: there is a driver

    module = torch.xpu if torch.xpu.is_available() else torch.cuda
    return Build(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        xpu=getattr(torch.version, "xpu", None) is not None,
        devices=module.device_count() if module.is_available() else 0,
    )


def nvidia_problem(root: Path, find: FindBuild) -> str | None:
    """Of CUDA devices."""
    driver = _driver_version(root)
    if driver is None and not (root / "dev/nvidiactl").exists():
        return (
            "no NVIDIA driver is loaded on this machine; install one, until nvidia-smi lists the "
            f"GPU, {ELSE}"
        )
    build = find()
    if build.cuda is None:
        return _wrong_build(build, "CUDA", "https://pytorch.org/get-started/locally")
    least = _DRIVERS.get(int(build.cuda.split(".")[0]), _DRIVERS[_NEWEST_CUDA])
    if driver is not None and driver[0] < least:
        return (
            f"the NVIDIA driver {driver[1]} is too old for CUDA {build.cuda} of torch "
            f"{build.version}, which needs {least} or newer; update the driver, install a torch "
            f"for an older CUDA, {ELSE}"
        )
    if not build.devices:
        return (
            "the NVIDIA driver shows this process no GPU; look at nvidia-smi and at "
            f"CUDA_VISIBLE_DEVICES, {ELSE}"
        )
    return None


def amd_problem(root: Path, find: FindBuild) -> str | None:
    """Of ROCm devices."""
    if not (root / "dev/kfd").exists():
        return (
            "the AMD driver (amdgpu with /dev/kfd) is not loaded on this machine; install ROCm's, "
            f"until rocminfo lists the GPU, {ELSE}"
        )
    build = find()
    if build.hip is None:
        return _wrong_build(build, "ROCm", "https://pytorch.org/get-started/locally")
    if not build.devices:
        return (
            "ROCm shows this process no GPU; look at rocminfo, at HIP_VISIBLE_DEVICES and at the "
            f"groups video and render, {ELSE}"
        )
    return None


def intel_problem(root: Path, find: FindBuild) -> str | None:
    """Of XPU devices."""
    if not (root / "dev/dri").exists():
        return f"there is no Intel GPU with a driver (/dev/dri) on this machine; install it, {ELSE}"
    build = find()
    if not build.xpu:
        return _wrong_build(build, "XPU", "https://pytorch.org/get-started/locally")
    return None if build.devices else f"torch finds no Intel GPU; look at xpu-smi, {ELSE}"


def _wrong_build(build: Build, wanted: str, where: str) -> str:
    if not build.version:
        return f"torch is not installed; install its build for {wanted} ({where}), {ELSE}"
    return (
        f"the installed torch {build.version} was built without {wanted}; install a build with it "
        f"({where}), {ELSE}"
    )


def _driver_version(root: Path) -> tuple[int, str] | None:
    """Its first number and the whole; None if unknown."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,})\.\d+(?:\.\d+)?\b", text)
    return (int(found[1]), found[0]) if found else None
