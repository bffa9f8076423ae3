"""Collectives as ops of native programs on one rank. Run as a script, it is another rank."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Communicator, ExpertRanks, ExpertWeights, Routing
from sylvan.kernels.native.library import load
from sylvan.kernels.native.ranks import SharedRanks
from tests.support.native import DTYPES, native, random

BUFFER_BYTES = 4096  # so that rows go in parts
ROWS, COLS, VOCAB = 37, 70, 101


def inputs(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return partial sums, rows of the model's type, and columns of logits of a rank of two."""
    wide = random(ROWS, COLS, dtype=torch.float32, seed=rank)
    rows = random(ROWS, COLS, dtype=dtype, seed=10 + rank)
    share = -(-VOCAB // 2)
    mine = share if rank == 0 else VOCAB - share
    return wide, rows, random(ROWS, mine, dtype=torch.float32, seed=20 + rank)


EXPERTS, CHOSEN, INNER = 6, 3, 48
PLACED = ((0, 3, 5, 1), (2, 4, 1, 0))
"""Experts of two ranks: two of them are on both."""


def experts_of(numbers: tuple[int, ...], dtype: torch.dtype, cols: int = COLS) -> ExpertWeights:
    """Return the weights of some experts."""
    up = random(EXPERTS, 2 * INNER, cols, dtype=dtype, seed=40, scale=0.2)
    down = random(EXPERTS, cols, INNER, dtype=dtype, seed=41, scale=0.2)
    return ExpertWeights(gate_up=up[list(numbers)].clone(), down=down[list(numbers)].clone())


def divided(
    ranks: Communicator, dtype: torch.dtype, *, by_share: bool, cols: int = COLS
) -> ExpertWeights:
    """Return the experts of a rank of two; `by_share`: each sums some of the rows."""
    slots = [[s for s, e in enumerate(PLACED[0] + PLACED[1]) if e == x] for x in range(EXPERTS)]
    table = torch.tensor([[own[0], own[-1]] for own in slots], dtype=torch.int32)
    expert_ranks = ExpertRanks(
        ranks=ranks, groups=2, per_group=len(PLACED[0]), slots_EC=table, all_to_all=by_share
    )
    return replace(experts_of(PLACED[ranks.rank], dtype, cols), expert_ranks=expert_ranks)


def mixtures(ranks: Communicator, dtype: torch.dtype, compute) -> list[torch.Tensor]:
    """Return the results of `compute` on two ranks that share experts, or on one rank with all
    experts.
    """
    logits = random(ROWS, EXPERTS, dtype=torch.float32, seed=42)
    rows = random(ROWS, COLS, dtype=dtype, seed=43)
    found: list[torch.Tensor] = []
    for scales, by_share in itertools.product((False, True), repeat=2):
        routing = Routing(top_k=CHOSEN, normalise=True, scale_inputs=scales)
        whole = ranks.size == 1
        every = tuple(range(EXPERTS))
        weights = experts_of(every, dtype) if whole else divided(ranks, dtype, by_share=by_share)
        load = torch.zeros(EXPERTS, dtype=torch.int64)
        given = routing, weights, load
        found.append(compute(lambda x, y, given=given: ops.experts(x, y, *given), rows, logits))
        assert load.sum() == ROWS * CHOSEN
        found.append(load)
    return found


def collectives(ranks: Communicator, dtype: torch.dtype, compute) -> list[torch.Tensor]:
    """Results of `compute(op, *matrices)` for each collective, in the same order on every rank."""
    wide, rows, logits = inputs(ranks.rank, dtype)
    bias = random(COLS, dtype=dtype, seed=30)
    return [
        compute(lambda x, like: ops.all_reduce(x, ranks, bias, like=like), wide, rows),
        compute(lambda x: ops.all_reduce(x, ranks, bias), wide),
        compute(lambda x: ops.all_reduce(x, ranks), rows),
        compute(lambda x: ops.all_gather(x, ranks, VOCAB), logits),
    ]


def run_rank(variant: str, path: Path, rank: int, what=collectives) -> list[torch.Tensor]:
    """Run all of them in programs, for both types of rows."""
    library = load(variant)
    ranks = SharedRanks(library, path, rank, 2, 60.0, BUFFER_BYTES)
    ranks.join(60.0)
    found: list[torch.Tensor] = []
    for dtype in DTYPES:

        def compute(op, *matrices, dtype=dtype):
            return native(library, dtype, lambda _, *values: op(*values), matrices)

        found += what(ranks, dtype, compute)
    ranks.check()
    return found


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]), 1, globals()[sys.argv[3]])
