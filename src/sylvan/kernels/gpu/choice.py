"""Which implementation of an op a tensor gets: Triton's on a GPU, else the reference.

Triton is imported when the first op meets a tensor on a GPU, never before: a machine without one
does not pay for it, nor need it installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def triton_installed() -> bool:
    """Whether the extra `gpu` is installed."""
    return importlib.util.find_spec("triton") is not None


def on_gpu(x: torch.Tensor) -> bool:
    """Whether Triton kernels can take this tensor (CUDA and ROCm tensors are both `cuda`)."""
    return x.is_cuda and triton_installed()


class KernelDispatch(Generic[P, T]):
    """Selects an op's implementation by the device of its tensors.

    `module` contains a function with the name and signature of `reference`.
    """

    def __init__(self, reference: Callable[P, T], module: str) -> None:
        self.reference = reference
        self._module = module

    @functools.cached_property
    def on_device(self) -> Callable[P, T]:
        """The function for a GPU; the first access imports Triton."""
        module = importlib.import_module(self._module)
        return cast("Callable[P, T]", getattr(module, self.reference.__name__))

    def on(self, x: torch.Tensor) -> Callable[P, T]:
        """The function for tensors on the device of x."""
        return self.on_device if on_gpu(x) else self.reference
