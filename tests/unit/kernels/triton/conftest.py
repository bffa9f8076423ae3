"""Kernels of this directory are interpreted, whichever test comes first; not with `--device`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

THERE = importlib.util.find_spec("triton") is not None
if not THERE:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if THERE and config.getoption("device") == "cpu":
        importlib.import_module("tests.support.interpreted")


@pytest.fixture(autouse=True)
def numbers_of_a_gpu() -> Iterator[None]:
    """The interpreter computes by numpy, which warns of infinities where a GPU continues."""
    with np.errstate(all="ignore"):
        yield
