"""Kernels compile ahead of time, on a machine without a GPU, without spills.

A sample, for a chip of each vendor: `make aot` compiles all of them for all chips, as CI does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_a_sample_of_kernels_fits_the_chip(target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sylvan.kernels.aot", "--sample", "--target", target]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "COLUMNS": "150"}

    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=900
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("decode_kernel", "extend_kernel", "draw_kernel", "product_kernel"):
        assert kernel in done.stdout
    assert " 0 faults" in done.stdout
