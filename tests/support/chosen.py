"""The device that tests run on: the CPU, or the one named by `--device`. Imports no torch."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import TypeVar

import pytest

from sylvan.runtime.platform.find import load_kinds

T = TypeVar("T")

NAMES = ("cpu", "cuda")
WITHOUT = "needs a GPU; where there is one, run pytest --device cuda"
_CHOSEN = SimpleNamespace(name="cpu")


def choose(name: str) -> None:
    """Apply the option `--device`, before any test is imported.

    Raises:
        UsageError: it cannot be used on this machine.
    """
    if name != "cpu":
        if why := load_kinds(())[name].problem():
            raise pytest.UsageError(f"--device {name}: {why}")
        if importlib.util.find_spec("triton") is None:
            raise pytest.UsageError(f"--device {name}: Triton is not installed")
    _CHOSEN.name = name


def device_name() -> str:
    """Return the device's name, as the configuration and torch use it."""
    return _CHOSEN.name


def on_gpu() -> bool:
    """Whether kernels are compiled instead of interpreted."""
    return _CHOSEN.name != "cpu"


def more(*cases: T) -> tuple[T, ...]:
    """Return cases for the device only, which are too slow or wrong in the interpreter."""
    return cases if on_gpu() else ()
