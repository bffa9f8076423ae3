"""A Triton driver without a device, to compile kernels for chips that this machine lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver


@dataclass(frozen=True, slots=True)
class ChipTarget:
    """A chip: Triton's name for it, shared memory per program, and its FP8 dtype if any.

    `spills`: bytes that a kernel may spill there, because it was measured to be faster so.
    `by_default`: whether kernels are compiled for it unless chips are named.
    """

    name: str
    gpu: GPUTarget
    shared_bytes: int
    fp8: torch.dtype | None
    spills: Mapping[str, int] = field(default_factory=dict)
    by_default: bool = True


# A tile of 128 x 64 with 4 warps spills around its loops, and still runs prompts at 419 TFLOP/s on
# an H100; the best tile without spills (128 x 128, 8 warps) reaches 379.
_H100 = {"extend_kernel": 384}


TARGETS = (
    ChipTarget("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024, None),
    ChipTarget("sm_89", GPUTarget("cuda", 89, 32), 99 * 1024, torch.float8_e4m3fn),
    ChipTarget("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024, torch.float8_e4m3fn, _H100),
    ChipTarget("sm_100", GPUTarget("cuda", 100, 32), 227 * 1024, torch.float8_e4m3fn),
    ChipTarget(
        "sm_120", GPUTarget("cuda", 120, 32), 99 * 1024, torch.float8_e4m3fn, by_default=False
    ),
    ChipTarget("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, torch.float8_e4m3fnuz),
    ChipTarget("gfx950", GPUTarget("hip", "gfx950", 64), 160 * 1024, torch.float8_e4m3fn),
)


# Triton leaves the results of its methods without types.
_Driver: Any = DriverBase


class _Absent(_Driver):
    """A driver that only answers the compiler's questions; it cannot launch kernels."""

    def __init__(self, gpu: GPUTarget) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def is_active(cls) -> bool:
        """Return False: Triton must not find this driver by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not used: nothing is launched."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The chip to compile for."""
        return self._gpu

    def get_active_torch_device(self) -> torch.device:
        """Device of tensors without data."""
        return torch.device("meta")

    def get_current_device(self) -> int:
        """Always device 0."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """No stream is used."""
        return device

    def get_benchmarker(self) -> Any:
        """Not available: nothing runs."""
        raise NotImplementedError


def compile_for(target: ChipTarget) -> None:
    """Make all kernels of this process compile for `target`; they cannot be launched then."""
    driver.set_active(_Absent(target.gpu))
