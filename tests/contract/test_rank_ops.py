"""Collectives within native programs of two processes: the bits of the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Unsupported
from sylvan.kernels.collective.reference import thread_ranks
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import load
from sylvan.kernels.native.ranks import SharedRanks
from sylvan.protocol.errors import RankLostError
from sylvan.runtime.layers.mesh import SingleRank
from tests.support.native import DTYPES, native, random, variants
from tests.support.rank_ops import collectives, mixtures, run_rank
from tests.support.ranks import in_threads


def on_two(variant: str, memory: Path, what) -> list[torch.Tensor]:
    """The result of the first of two processes."""
    command = [sys.executable, "-m", "tests.support.rank_ops", variant, str(memory), what.__name__]
    other = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    found = run_rank(variant, memory, 0, what)
    assert other.wait(60) == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants())
def test_experts_of_two_ranks_have_the_bits_of_those_of_one(variant: str, tmp_path: Path):
    found = on_two(variant, tmp_path / "memory", mixtures)

    library, expected = load(variant), []
    for dtype in DTYPES:

        def compute(op, *matrices, dtype=dtype):
            return native(library, dtype, lambda _, *values: op(*values), matrices)

        expected += mixtures(SingleRank(), dtype, compute)
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_that_threads_share_have_the_bits_of_those_of_one(dtype: torch.dtype):
    def run(rank):
        return mixtures(rank, dtype, lambda op, *xs: op(*xs))

    expected = run(SingleRank())
    for found in in_threads([lambda rank=rank: run(rank) for rank in thread_ranks(2)]):
        for one, wanted in zip(found, expected, strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("variant", variants())
def test_collectives_of_programs_have_the_bits_of_the_reference(variant: str, tmp_path: Path):
    found = on_two(variant, tmp_path / "memory", collectives)

    expected = []
    for dtype in DTYPES:
        calls = [
            lambda rank=rank, dtype=dtype: collectives(rank, dtype, lambda op, *xs: op(*xs))
            for rank in thread_ranks(2)
        ]
        expected += in_threads(calls)[0]
    for one, wanted in zip(found, expected, strict=True):
        assert one.dtype == wanted.dtype
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("variant", variants())
def test_a_rank_that_is_lost_within_a_program_is_reported(variant: str, tmp_path: Path):
    library = load(variant)
    ranks = SharedRanks(library, tmp_path / "memory", 0, 2, 0.2)
    x = random(3, 40, dtype=torch.float32)

    native(library, torch.float32, lambda _, v: ops.all_reduce(v, ranks), [x])

    with pytest.raises(RankLostError, match=r"rank 1 did not arrive within 0\.2 s"):
        ranks.check()


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_of_other_ranks_give_zeros(variant: str, dtype: torch.dtype):
    library, ids = load(variant), torch.tensor([0, 4, 5, 9, 14, 15], dtype=torch.int32)
    table = random(10, 48, dtype=dtype)
    packed = table.clone()  # and let go
    want = ops.embedding(ids, table, 1.5, part_from=5)
    step = StepRun(tokens=len(ids), ids=ids.data_ptr())

    found = native(
        library, dtype, lambda t: ops.embedding(t.input_ids, packed, 1.5, part_from=5), [], step
    )

    assert torch.equal(found, want)
    assert want[[0, 1, 5]].abs().sum() == 0
    assert torch.equal(want[2], 1.5 * table[0].float())


def test_ranks_that_share_no_memory_have_no_programs():
    if not isinstance(variants()[0], str):
        pytest.skip("kernels are not compiled")
    rank, x = thread_ranks(2)[0], random(3, 40, dtype=torch.float32)

    with pytest.raises(Unsupported, match="ranks that share no memory"):
        native(load(), torch.float32, lambda _, v: ops.all_reduce(v, rank), [x])
