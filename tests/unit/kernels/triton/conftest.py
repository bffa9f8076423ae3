"""Kernels of this directory are interpreted, whichever test comes first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support import interpreted

__all__ = ["interpreted"]


@pytest.fixture(autouse=True)
def numbers_of_a_gpu() -> Iterator[None]:
    """The interpreter computes by numpy, which warns of infinities where a GPU goes on."""
    with np.errstate(all="ignore"):
        yield
