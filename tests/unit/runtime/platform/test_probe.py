from __future__ import annotations

import importlib.metadata

import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.runtime.platform.kinds.cuda import CudaKind
from sylvan.runtime.platform.kinds.rocm import RocmKind
from sylvan.runtime.platform.kinds.tpu import TpuKind
from sylvan.runtime.platform.kinds.xpu import XpuKind
from sylvan.runtime.platform.probe import (
    TorchBuild,
    amd_memory,
    apple_problem,
    find_build,
    jax_problem,
    nvidia_capability,
    nvidia_memory,
)

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC 12.3.0\n"
GOOD = TorchBuild(version="2.11.0+cu130", cuda="13.0")


def machine(tmp_path, *, driver="", **paths):
    for path in paths.values():
        (tmp_path / path).mkdir(parents=True)
    if driver:
        file = tmp_path / "proc/driver/nvidia/version"
        file.parent.mkdir(parents=True)
        file.write_text(VERSION.format(driver))
    return tmp_path


@pytest.mark.parametrize(
    ("driver", "build", "said"),
    [
        ("", GOOD, "no NVIDIA driver is loaded"),
        (
            "580.65.06",
            TorchBuild(version="2.13.0+cpu"),
            r"torch 2.13.0\+cpu was built without CUDA",
        ),
        ("580.65.06", TorchBuild(), "torch is not installed"),
        ("535.183.01", GOOD, "driver 535.183.01 is too old for CUDA 13.0 .* needs 580"),
        ("515.10.01", TorchBuild(version="2.11", cuda="12.8"), "needs 525"),
        ("580.65.06", GOOD, "shows this process no GPU"),
    ],
)
def test_cuda_that_cannot_be_used_says_why(tmp_path, driver, build, said):
    problem = CudaKind(machine(tmp_path, driver=driver), build).problem()

    assert problem is not None
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problem)
    assert "device=cpu" in problem
    assert "\n" not in problem


@pytest.mark.parametrize("driver", ["580.65.06", "590.10"])
def test_cuda_with_driver_and_torch_can_be_used(tmp_path, driver):
    root = machine(tmp_path, driver=driver, node="dev/nvidia0")

    assert CudaKind(root, GOOD).problem() is None


@pytest.mark.parametrize(
    ("capability", "said"),
    [((7, 5), "compute capability 7.5, and the kernels need 8.0"), ((8, 0), None), (None, None)],
)
def test_chips_that_kernels_do_not_support_are_refused(tmp_path, capability, said):
    root = machine(tmp_path, driver="590.10", node="dev/nvidia0")
    problem = CudaKind(root, GOOD, lambda: capability).problem()

    assert (problem is None) == (said is None)
    assert said is None or (said in str(problem) and str(problem).endswith("auto"))


@pytest.mark.parametrize(
    ("kind", "chip", "number"),
    [
        (CudaKind, "sm_80", None),
        (CudaKind, "sm_86", None),
        (CudaKind, "sm_89", "float8_e4m3fn"),
        (CudaKind, "sm_90", "float8_e4m3fn"),
        (CudaKind, "sm_120", "float8_e4m3fn"),
        (RocmKind, "gfx90a", None),
        (RocmKind, "gfx942", "float8_e4m3fnuz"),
        (RocmKind, "gfx950", "float8_e4m3fn"),
        (RocmKind, "gfx1100", None),
        (XpuKind, "Intel Arc", None),
    ],
)
def test_eight_bits_are_known_by_the_chip(kind, chip, number):
    assert kind.facts.float8_of(chip) == number
    assert number is None or getattr(torch, number).itemsize == 1


def test_cuda_without_a_driver_file_relies_on_its_nodes(tmp_path):
    root = machine(tmp_path, node="dev/nvidiactl", first="dev/nvidia0")

    assert CudaKind(root, GOOD).problem() is None


def test_rocm_that_cannot_be_used_says_why(tmp_path):
    hip = TorchBuild(version="2.11+rocm7", hip="7.0")
    assert "/dev/kfd" in str(RocmKind(tmp_path, hip).problem())
    root = machine(tmp_path, node="dev/kfd")

    assert "built without ROCm" in str(RocmKind(root, GOOD).problem())
    assert "no GPU" in str(RocmKind(root, hip).problem())
    root = machine(tmp_path, node="dev/dri/renderD128")
    assert RocmKind(root, hip).problem() is None


def test_xpu_that_cannot_be_used_says_why(tmp_path):
    assert "/dev/dri" in str(XpuKind(tmp_path, GOOD).problem())
    root = machine(tmp_path, node="dev/dri/renderD128")

    assert "built without XPU" in str(XpuKind(root, GOOD).problem())
    assert XpuKind(root, TorchBuild(version="2.11", xpu="2025.2")).problem() is None


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"device=tpu: no TPU is attached .* device=jax"):
        open_platform(load_kinds(())["tpu"])


def test_the_installed_torch_is_known_without_importing_it():
    build = find_build()

    assert build.version.startswith(torch.__version__.split("+")[0])
    assert (build.cuda, build.hip) == (torch.version.cuda, torch.version.hip)


def test_memory_is_asked_of_drivers(tmp_path):
    assert nvidia_memory("libnothing.so") is None
    assert nvidia_capability("libnothing.so") is None
    assert amd_memory(tmp_path) is None
    card = tmp_path / "sys/class/drm/card1/device"
    card.mkdir(parents=True)
    (card / "mem_info_vram_total").write_text("1000\n")
    (card / "mem_info_vram_used").write_text("300\n")

    assert RocmKind(tmp_path).memory() == (700, 1000)


def test_macs_with_apple_silicon_may_have_a_gpu():
    assert apple_problem("Darwin", "arm64") is None
    assert "not a Mac with Apple silicon (Linux x86_64)" in apple_problem("Linux", "x86_64")


def test_a_missing_or_old_jax_is_one_sentence(monkeypatch):
    versions = {"jax": "0.4.30"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)

    assert "jax 0.4.30 is too old, 0.8.0 or newer" in jax_problem("jax")
    versions["jax"] = "0.10.0rc1"
    assert "jaxlib is not installed; pip install 'sylvan[jax]'" in jax_problem("jax")
    versions["jaxlib"] = "0.7.2"
    assert "jaxlib 0.7.2 is too old" in jax_problem("jax")
    versions["jaxlib"] = "0.10.0"
    assert jax_problem("jax") is None
    assert "libtpu is not installed; pip install 'sylvan[tpu]'" in jax_problem("tpu", "libtpu")


def test_a_machine_without_a_tpu_is_reported(tmp_path, monkeypatch):
    assert "no TPU is attached" in TpuKind(tmp_path).problem()
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").touch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")

    assert TpuKind(tmp_path).problem() is None
