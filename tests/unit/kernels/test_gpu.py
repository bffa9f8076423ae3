"""Choosing between references and Triton, and the table of tiles; no GPU and no Triton needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sylvan.kernels.gpu.choice import KernelDispatch
from sylvan.kernels.gpu.tiles import Arch, ceil_div, power_of_two, tile
from sylvan.kernels.norm import reference


def test_a_cpu_tensor_gets_the_reference_and_triton_is_not_looked_for() -> None:
    choice = KernelDispatch("norm.rms_norm", reference.rms_norm)

    assert choice.on(torch.empty(1)) is reference.rms_norm


@pytest.mark.slow
def test_ops_do_not_import_triton() -> None:
    code = (
        "import sys, sylvan.kernels.ops, sylvan.kernels.paged.pages, sylvan.kernels.sample.device\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("arch", ["interpreter", "sm80", "sm90", "sm100", "gfx9"])
@pytest.mark.parametrize("op", ["decode", "extend", "experts"])
def test_every_width_has_a_tile_that_triton_takes(op: str, arch: Arch) -> None:
    for size in (2, 4):
        for width in (1, 64, 100, 128, 256, 576, 4096):
            found = tile(op, width, size, arch)
            for sides in (found.rows, found.cols, found.inner or 16):
                assert sides >= 16
                assert power_of_two(sides) == sides


def test_blocks_cover_what_they_must() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
