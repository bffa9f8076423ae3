"""Collectives as ops of native programs, on one rank. As a script: the other ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Communicator
from sylvan.kernels.native.library import load
from sylvan.kernels.native.ranks import SharedRanks
from tests.support.native import DTYPES, native, random

ROOM_BYTES = 4096  # so that rows go in parts
ROWS, COLS, VOCAB = 37, 70, 101


def inputs(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial sums, rows of the model's type, and columns of logits of a rank of two."""
    wide = random(ROWS, COLS, dtype=torch.float32, seed=rank)
    rows = random(ROWS, COLS, dtype=dtype, seed=10 + rank)
    share = -(-VOCAB // 2)
    mine = share if rank == 0 else VOCAB - share
    return wide, rows, random(ROWS, mine, dtype=torch.float32, seed=20 + rank)


def collectives(ranks: Communicator, dtype: torch.dtype, compute) -> list[torch.Tensor]:
    """What `compute(op, *matrices)` makes of each collective, in the same order on every rank."""
    wide, rows, logits = inputs(ranks.rank, dtype)
    bias = random(COLS, dtype=dtype, seed=30)
    return [
        compute(lambda x, like: ops.all_reduce(x, ranks, bias, like=like), wide, rows),
        compute(lambda x: ops.all_reduce(x, ranks, bias), wide),
        compute(lambda x: ops.all_reduce(x, ranks), rows),
        compute(lambda x: ops.all_gather(x, ranks, VOCAB), logits),
    ]


def run_rank(variant: str, path: Path, rank: int) -> list[torch.Tensor]:
    """All of them in programs, for both types of rows."""
    library = load(variant)
    ranks = SharedRanks(library, path, rank, 2, 60.0, ROOM_BYTES)
    ranks.join(60.0)
    found: list[torch.Tensor] = []
    for dtype in DTYPES:

        def compute(op, *matrices, dtype=dtype):
            return native(library, dtype, lambda _, *values: op(*values), matrices)

        found += collectives(ranks, dtype, compute)
    ranks.check()
    return found


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]), 1)
