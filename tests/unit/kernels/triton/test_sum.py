"""Sums over ranks by kernels that meet in shared memory: the reference's bits, on every rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sylvan.kernels.collective.reference import tree_sum
from tests.support.chosen import on_gpu
from tests.support.sum_ranks import ONE_SHOT, TWO_SHOT, file_bytes, message

pytestmark = pytest.mark.skipif(on_gpu(), reason="ranks are processes with memory of the host")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_has_the_sum_in_the_order_of_the_tree(size: int, tmp_path: Path) -> None:
    shared = tmp_path / "memory"
    shared.write_bytes(bytes(file_bytes(size)))
    outs = [tmp_path / f"{rank}.pt" for rank in range(size)]
    command = [sys.executable, "-m", "tests.support.sum_ranks", str(shared)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(out)])
        for rank, out in enumerate(outs)
    ]
    assert [rank.wait(300) for rank in ranks] == [0] * size

    counts = [count for count in (*ONE_SHOT, *TWO_SHOT) for _ in range(2)]
    for out in outs:
        found = torch.load(out)
        for one, count in zip(found, counts, strict=True):
            whole = torch.stack([message(rank, count) for rank in range(size)])
            assert torch.equal(one, tree_sum(whole))
