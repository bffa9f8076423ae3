"""The device that tests run on: the CPU, or the one that `--device` names. Imports no torch."""

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
    """The option `--device`, read before any test is imported.

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
    """As the configuration and torch call it."""
    return _CHOSEN.name


def on_gpu() -> bool:
    """Whether kernels are compiled, rather than interpreted."""
    return _CHOSEN.name != "cpu"


def more(*cases: T) -> tuple[T, ...]:
    """Cases for the device only: too large for the interpreter, or wrong there."""
    return cases if on_gpu() else ()
