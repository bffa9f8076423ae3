"""Tensors on the device under test, with the same numbers on all devices, and their comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch

from sylvan.runtime.platform.find import load_kinds
from tests.support.chosen import device_name, more, on_gpu

T = TypeVar("T")

# The interpreter multiplies bf16 wrongly.
DTYPES = [torch.float32, torch.float16, *more(torch.bfloat16)]


def put(x: T) -> T:
    """Copy to the device under test: a tensor, or a dataclass of tensors that share no memory.

    Tensors that are already there are not copied.
    """
    return _moved(x, torch.device(device_name()))


def home(x: T) -> T:
    """Copy to the CPU, so that references do not choose kernels of a GPU."""
    return _moved(x, torch.device("cpu"))


def _moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        return dataclasses.replace(
            x, **{name: _moved(part, device) for name, part in parts.items()}
        )
    return x


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers that depend on the seed only."""
    return put(torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ints(values: Sequence[int]) -> torch.Tensor:
    """int32 (len(values),)."""
    return put(torch.tensor(values, dtype=torch.int32))


def fp8() -> torch.dtype:
    """Return the 8-bit float type with 4 exponent bits; skip the test on a chip without it."""
    if on_gpu():
        major, minor = torch.cuda.get_device_capability()
        if load_kinds(())[device_name()].facts.float8_of(f"sm_{major}{minor}") is None:
            pytest.skip(f"compute capability {major}.{minor} has no 8-bit floats")
    return torch.float8_e4m3fn


def tolerance(dtype: torch.dtype, single: float, half: float) -> float:
    """Return the tolerance of a type; bf16 has three bits less than half precision."""
    return {torch.float32: single, torch.float16: half, torch.bfloat16: 8 * half}[dtype]
