"""Kernels of this directory are interpreted, whichever test comes first."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    importlib.import_module("tests.support.interpreted")


@pytest.fixture(autouse=True)
def numbers_of_a_gpu() -> Iterator[None]:
    """The interpreter computes by numpy, which warns of infinities where a GPU goes on."""
    with np.errstate(all="ignore"):
        yield
