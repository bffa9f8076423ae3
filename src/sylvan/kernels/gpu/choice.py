"""Selects the implementation of an op by the tensor's device and dtype, and the chip.

A kernel is imported when an op first meets a tensor that it supports. So a machine without a GPU
needs no Triton and does not pay for its import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from sylvan.kernels.registry import KernelRegistry, is_installed, load, registry

P = ParamSpec("P")
T = TypeVar("T")


def triton_installed() -> bool:
    """Whether the extra `gpu` is installed."""
    return is_installed("triton")


def kernels_for(op: str, device: torch.device) -> Any:
    """The best kernel module of an op for a device, or None."""
    found = [spec for spec in registry().usable(op, device.type) if spec.target]
    return load(found[0].target) if found else None


class KernelDispatch(Generic[P, T]):
    """Selects an op's implementation by the device and the type of a tensor.

    Args:
        op: Folder and name of the reference, as in `registry.KernelSpec`.
        reference: Called for tensors that no kernel supports.
        kernels: Kernels to choose from; by default those of all installed packages.
    """

    def __init__(
        self, op: str, reference: Callable[P, T], kernels: KernelRegistry | None = None
    ) -> None:
        self.op, self.reference, self._kernels = op, reference, kernels
        self._chosen: dict[tuple[str, torch.dtype], Callable[P, T]] = {}

    def on(self, x: torch.Tensor) -> Callable[P, T]:
        """The function for tensors of the device and the type of x."""
        key = x.device.type, x.dtype
        if key not in self._chosen:
            self._chosen[key] = self._choose(x)
        return self._chosen[key]

    def _choose(self, x: torch.Tensor) -> Callable[P, T]:
        device, dtype = x.device.type, str(x.dtype).removeprefix("torch.")
        specs = [s for s in (self._kernels or registry()).usable(self.op, device) if s.target]
        chip = chip_of(x.device) if any(spec.chips for spec in specs) else ""
        options: list[tuple[Callable[P, bool], Callable[P, T]]] = []
        for spec in specs:
            if spec.fits(device, dtype, chip):
                function = cast("Callable[P, T]", load(spec.target))
                if not spec.takes:
                    return _first_of(options, function)
                options.append((cast("Callable[P, bool]", load(spec.takes)), function))
        return _first_of(options, self.reference)


def _first_of(
    options: Sequence[tuple[Callable[P, bool], Callable[P, T]]], last: Callable[P, T]
) -> Callable[P, T]:
    """Call the first function that takes the arguments, or the last one."""
    if not options:
        return last

    def chosen(*args: P.args, **more: P.kwargs) -> T:
        for takes, function in options:
            if takes(*args, **more):
                return function(*args, **more)
        return last(*args, **more)

    return chosen


def chip_of(device: torch.device) -> str:
    """Compiler name of a GPU's architecture (`sm_90`, `gfx942`); "" for other devices."""
    if device.type != "cuda":
        return ""
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
