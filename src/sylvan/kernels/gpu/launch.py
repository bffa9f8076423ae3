"""Launches Triton kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.runtime import driver

from sylvan.kernels.gpu.tiles import Arch

EARLY: frozenset[Arch] = frozenset({"sm90", "sm100"})
"""Architectures whose kernels may start early (programmatic dependent launch)."""
_HOPPER, _BLACKWELL, _DESKTOP = 90, 100, 120
"""Compute capabilities, tenfold; chips below `_DESKTOP` have 227 KiB of shared memory."""


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Run `kernel` over `grid`; the first argument is a tensor.

    Meta tensors only compile it, specialised as for the real call, to check kernels without a GPU.
    An empty grid launches nothing.
    """
    first = args[0]
    assert isinstance(first, torch.Tensor)
    if first.is_meta:
        kernel.warmup(*args, grid=grid, **options)
    elif 0 not in grid:
        kernel[grid](*args, **options)


def launch_early(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """`launch` a kernel that may start before the previous one has finished, on chips that can.

    This is NVIDIA's programmatic dependent launch (compute capability 9.0 and later): programs are
    resident and have read their weights by the time their inputs are complete. Every program must
    call `triton_early.inputs_ready` before it reads outputs of other kernels, and before it writes.
    """
    first = args[0]
    assert isinstance(first, torch.Tensor)
    early = arch_of(first) in EARLY
    if early:  # other backends reject the option
        options["launch_pdl"] = True
    launch(kernel, grid, *args, EARLY=early, **options)


def arch_of(x: torch.Tensor) -> Arch:
    """Target of kernels on x: the interpreter for CPU tensors, else the chip of the driver."""
    if x.device.type == "cpu":
        return "interpreter"
    return _target() if x.is_meta else _target_of(x.device)


@functools.cache
def _target_of(device: torch.device) -> Arch:
    del device  # the driver's current one; a process has one kind of GPU
    return _target()


def _target() -> Arch:
    target: Any = driver.active.get_current_target()
    if target.backend != "cuda":
        return "gfx9"
    capability = int(target.arch)
    if _BLACKWELL <= capability < _DESKTOP:
        return "sm100"
    return "sm90" if _HOPPER <= capability < _BLACKWELL else "sm80"
