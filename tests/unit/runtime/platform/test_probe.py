from __future__ import annotations

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.runtime.platform.kinds.cuda import CudaKind
from sylvan.runtime.platform.kinds.rocm import RocmKind
from sylvan.runtime.platform.kinds.xpu import XpuKind
from sylvan.runtime.platform.probe import Build

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC 12.3.0\n"
GOOD = Build(version="2.11.0+cu130", cuda="13.0", devices=1)


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
        ("580.65.06", Build(version="2.13.0+cpu"), r"torch 2.13.0\+cpu was built without CUDA"),
        ("580.65.06", Build(), "torch is not installed"),
        ("535.183.01", GOOD, "driver 535.183.01 is too old for CUDA 13.0 .* needs 580"),
        ("515.10.01", Build(version="2.11", cuda="12.8", devices=1), "needs 525"),
        ("580.65.06", Build(version="2.11", cuda="13.0"), "shows this process no GPU"),
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
    assert CudaKind(machine(tmp_path, driver=driver), GOOD).problem() is None


def test_cuda_without_a_driver_file_relies_on_torch(tmp_path):
    root = machine(tmp_path, node="dev/nvidiactl")

    assert CudaKind(root, GOOD).problem() is None


def test_rocm_that_cannot_be_used_says_why(tmp_path):
    hip = Build(version="2.11+rocm7", hip="7.0", devices=1)
    assert "/dev/kfd" in str(RocmKind(tmp_path, hip).problem())
    root = machine(tmp_path, node="dev/kfd")

    assert "built without ROCm" in str(RocmKind(root, GOOD).problem())
    assert "no GPU" in str(RocmKind(root, Build(version="2.11", hip="7.0")).problem())
    assert RocmKind(root, hip).problem() is None


def test_xpu_that_cannot_be_used_says_why(tmp_path):
    assert "/dev/dri" in str(XpuKind(tmp_path, GOOD).problem())
    root = machine(tmp_path, node="dev/dri")

    assert "built without XPU" in str(XpuKind(root, GOOD).problem())
    assert XpuKind(root, Build(version="2.11", xpu=True, devices=1)).problem() is None


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"device=tpu: .*sylvan\.platforms"):
        open_platform(load_kinds(())["tpu"])
