from __future__ import annotations

import pytest
import torch

from sylvan.protocol.errors import ConfigError, RankLostError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import VocabEmbedding
from sylvan.runtime.layers.mesh import ONE_RANK, Mesh, Share, Split, UnconnectedRank
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.models.shards import splits_of, take
from tests.support.ranks import on_ranks


def meshes(size: int) -> list[Mesh]:
    return [Mesh(UnconnectedRank(size, rank)) for rank in range(size)]


def test_one_rank_holds_everything():
    heads = ONE_RANK.heads(6, 2)

    assert heads == (Share(6, 0, 6), Share(2, 0, 2))
    assert not Split(*heads).is_divided
    assert ONE_RANK.over(Split(*heads)) is None


@pytest.mark.parametrize(("total", "size"), [(12, 3), (199, 2), (5, 4), (1, 2)])
def test_rows_of_a_vocabulary_are_on_one_rank_each(total, size):
    shares = [mesh.rows(total) for mesh in meshes(size)]

    held = [row for s in shares for row in range(s.start, s.start + s.size)]
    assert held == list(range(total))
    assert max(s.size for s in shares) == -(-total // size)


@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(8, 4, 2), (8, 2, 4), (8, 1, 8), (8, 8, 8), (12, 2, 4)]
)
def test_heads_of_queries_are_with_the_keys_they_look_at(queries, keys, size):
    seen = []
    for mesh in meshes(size):
        mine, theirs = mesh.heads(queries, keys)
        for head in range(mine.start, mine.start + mine.size):
            local = (head - mine.start) * theirs.size // mine.size
            assert theirs.start + local == head * keys // queries
            seen.append(head)

    assert seen == list(range(queries))


@pytest.mark.parametrize(("queries", "keys", "size"), [(8, 3, 2), (6, 4, 6), (9, 3, 2)])
def test_heads_that_do_not_divide_are_refused(queries, keys, size):
    with pytest.raises(ConfigError, match=rf"heads \(\d\) does not divide by {size} ranks"):
        Mesh(UnconnectedRank(size)).heads(queries, keys)


def test_a_split_takes_the_share_of_each_part():
    split = Split(Share(4, 2, 2), Share(3, 1, 1))
    whole = torch.arange(7)

    assert split.take(whole, 0).tolist() == [2, 3, 5]
    assert (split.size, split.whole, split.sizes) == (3, 7, (2, 1))


def test_a_parameter_says_how_it_is_divided():
    build = Build(dtype=torch.float32, length=1, mesh=Mesh(UnconnectedRank(2, 1)))
    split = build.mesh.split("rows", 4)
    parameter = build.empty(3, split, 5)
    whole = torch.randn(3, 4, 5)

    assert parameter.shape == (3, 2, 5)
    assert torch.equal(take(whole, splits_of(parameter)), whole[:, 2:])
    assert not splits_of(build.empty(3, 4))


@pytest.mark.parametrize("num_ids", [8, 7, 3])
def test_rows_of_a_divided_table_are_those_of_the_whole(num_ids):
    table = torch.randn(num_ids, 4)
    ids = torch.arange(num_ids, dtype=torch.int32)

    def run(mesh: Mesh) -> torch.Tensor:
        build = Build(dtype=torch.float32, length=1, mesh=mesh)
        layer = VocabEmbedding(build, num_ids, 4, scale=2.0)
        layer.weight.data.copy_(take(table, splits_of(layer.weight)))
        return layer(ids)

    for found in on_ranks(4, run):
        assert torch.equal(found, 2 * table)


def test_a_norm_of_divided_rows_is_over_all_of_them():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)

    def run(mesh: Mesh) -> torch.Tensor:
        split = mesh.split("columns", 8)
        norm = RMSNorm(Build(dtype=torch.float32, length=1, mesh=mesh), split, 1e-5, 1.0)
        norm.weight.data.copy_(split.take(weight, 0))
        return norm(split.take(x, -1), split.take(residual, -1))[0]

    total = x + residual
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * (weight + 1)
    torch.testing.assert_close(torch.cat(on_ranks(4, run), -1), expected)


def test_ranks_that_never_meet_compute_nothing():
    with pytest.raises(RankLostError, match="no other ranks"):
        UnconnectedRank(2).all_gather(torch.zeros(1))
