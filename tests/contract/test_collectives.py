"""Collectives by threads, over gloo, in shared memory: the same bits on every rank of each."""

from __future__ import annotations

import time

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Communicator, RowParts
from sylvan.kernels.collective.gloo import file_store, join_ranks
from sylvan.kernels.collective.nccl import DeviceRanks, choose_gpu
from sylvan.kernels.collective.reference import mean_of_squares, thread_ranks, tree_sum
from sylvan.kernels.native.library import describe, load
from sylvan.kernels.native.ranks import SharedRanks
from sylvan.protocol.errors import ConfigError, RankLostError
from tests.support.ranks import in_threads


@pytest.fixture(params=["threads", "gloo", "shared"])
def group(request, tmp_path):
    """Makes a group of ranks, and calls a function for each in a thread of its own."""

    def run(size, call, timeout_s=30.0):
        if request.param == "threads":
            return in_threads([lambda r=rank: call(r) for rank in thread_ranks(size, timeout_s)])

        if request.param == "shared" and describe().variant is None:
            pytest.skip("kernels are not compiled")

        def joined(rank: int):
            if request.param == "shared":
                path, buffer_bytes = tmp_path / "memory", 64  # so that messages go in parts
                shared = SharedRanks(load(), path, rank, size, timeout_s, buffer_bytes)
                shared.join(30.0)
                return call(shared)
            store = file_store(str(tmp_path / "meeting"), size)
            return call(join_ranks(store, rank, size, 30.0, timeout_s))

        return in_threads([lambda r=rank: joined(r) for rank in range(size)])

    return run


def parts(size: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_adds_in_a_fixed_tree_and_the_bias_once(group, size):
    given, bias = parts(size, 5, 7), torch.randn(7)

    found = group(size, lambda r: ops.all_reduce(given[r.rank], r, bias))

    for one in found:
        assert torch.equal(one, tree_sum(torch.stack(given)) + bias)


@pytest.mark.parametrize("count", [4096, 5001])
def test_long_messages_are_summed_alike(group, count):
    """By shares, where a group does so."""
    given = parts(3, count)

    found = group(3, lambda r: ops.all_reduce(given[r.rank], r))

    assert all(torch.equal(one, tree_sum(torch.stack(given))) for one in found)


class Short:
    """Sums of messages of one row; says which it got."""

    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def takes(self, x):
        return len(x) == 1

    def all_sum(self, x):
        self.seen.append(tuple(x.shape))
        return tree_sum(self.rank.all_gather(x))


def test_short_sums_of_devices_go_another_way(group):
    def run(rank: Communicator) -> list[tuple[int, ...]]:
        short = Short(rank)
        devices = DeviceRanks(rank, short)
        for rows in (1, 3):
            given = torch.full((rows, 4), 1.0 + rank.rank)
            assert torch.equal(devices.all_sum(given), torch.full((rows, 4), 3.0))
        assert devices.all_gather(torch.ones(2)).shape == (2, 2)
        assert devices.all_to_all(torch.ones(2, 1)).shape == (2, 1)
        return short.seen

    assert group(2, run) == [[(1, 4)], [(1, 4)]]


def test_fewer_gpus_than_ranks_are_refused():
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"{count + 1} ranks on this machine need a GPU each"):
        choose_gpu(0, count + 1)


def test_all_reduce_rounds_once(group):
    given = [torch.full((1, 3), value, dtype=torch.bfloat16) for value in (1.0, 2**-8, 2**-8)]

    for found in group(3, lambda r: ops.all_reduce(given[r.rank], r)):
        assert found.dtype == torch.bfloat16
        assert found.float().tolist() == [[1 + 2**-7] * 3]


@pytest.mark.parametrize("cols", [8, 7, 5])
def test_all_gather_puts_columns_side_by_side(group, cols):
    whole = torch.randn(3, cols)
    each = -(-cols // 4)

    found = group(4, lambda r: ops.all_gather(whole[:, r.rank * each :][:, :each], r, cols))

    assert all(torch.equal(one, whole) for one in found)


def test_no_rows_are_gathered_and_added_up_too(group):
    """A step that computes a part of a prompt has no logits."""

    def run(rank: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        none = torch.empty(0, 4)
        return ops.all_gather(none, rank, 8), ops.all_reduce(none, rank)

    for gathered, added in group(2, run):
        assert gathered.shape == (0, 8)
        assert added.shape == (0, 4)


def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum(group):
    given = parts(2, 6, 4)

    found = group(2, lambda r: ops.reduce_scatter(given[r.rank], r))

    assert torch.equal(torch.cat(found), tree_sum(torch.stack(given)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_to_all_exchanges_rows(group, dtype):
    given = [torch.arange(6).reshape(6, 1).add(100 * rank).to(dtype) for rank in range(3)]

    found = group(3, lambda r: ops.all_to_all(given[r.rank], r))

    for rank, one in enumerate(found):
        expected = torch.cat([other[2 * rank : 2 * rank + 2] for other in given])
        assert one.dtype == dtype
        assert torch.equal(one, expected)


def test_the_mean_of_squares_is_over_all_parts(group):
    whole = torch.randn(3, 8)

    def run(rank: Communicator) -> torch.Tensor:
        return mean_of_squares(whole.chunk(4, -1)[rank.rank], RowParts(rank))

    for found in group(4, run):
        torch.testing.assert_close(found, whole.square().mean(-1, keepdim=True))


def test_a_rank_that_ends_is_reported(group):
    def run(rank: Communicator):
        ops.all_reduce(torch.ones(2), rank)
        if rank.rank == 1:
            rank.close()
            return None
        with pytest.raises(RankLostError, match=r"has exited|did not arrive"):
            ops.all_reduce(torch.ones(2), rank)
        return True

    assert group(2, run)[0]


@pytest.mark.slow
def test_a_rank_that_is_late_is_reported(group):
    def run(rank: Communicator):
        ops.all_reduce(torch.ones(2), rank)
        if rank.rank == 1:
            time.sleep(1.5)
            return None
        with pytest.raises(RankLostError, match=r"has exited|did not arrive"):
            ops.all_reduce(torch.ones(2), rank)
        return True

    assert group(2, run, timeout_s=0.5)[0]


def test_a_rank_that_never_joins_is_named(tmp_path):
    store = file_store(str(tmp_path / "meeting"), 3)

    with pytest.raises(RankLostError, match=r"rank 1 of 3 did not join within 0\.2 s"):
        join_ranks(store, 0, 3, 0.2, 1.0)


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_a_rank_that_never_joins_in_shared_memory_is_named(tmp_path):
    shared = SharedRanks(load(), tmp_path / "memory", 0, 3, 1.0)

    with pytest.raises(RankLostError, match=r"rank 1 of 3 did not join within 0\.2 s"):
        shared.join(0.2)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_tree_sum_is_a_sum(count):
    given = torch.randn(count, 3, 4)

    torch.testing.assert_close(tree_sum(given), given.sum(0))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_aligned_parts_may_be_added_up_first(size):
    """So that 1, 2, 4 and 8 ranks have the same bits if each adds up its own parts."""
    given = torch.randn(8, 50) * 10 ** torch.linspace(-3, 3, 8)[:, None]
    by_rank = torch.stack([tree_sum(own) for own in given.unflatten(0, (size, -1))])

    assert torch.equal(tree_sum(by_rank), tree_sum(given))
