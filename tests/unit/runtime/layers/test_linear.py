from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, Linear, RowParallel, VocabHead
from sylvan.runtime.layers.mesh import Mesh, Share, Split, UnconnectedRank
from sylvan.runtime.models.shards import splits_of, take
from tests.support.ranks import on_ranks


def build(mesh: Mesh) -> Build:
    return Build(dtype=torch.float32, length=8, mesh=mesh)


def fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    parameter.data.copy_(take(whole, splits_of(parameter)))


def filled(layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    fill(layer.weight, weight)
    if bias is not None:
        fill(layer.bias, bias)
    return layer


def ranks(size: int, run: Callable[[Build], torch.Tensor]) -> list[torch.Tensor]:
    return on_ranks(size, lambda mesh: run(build(mesh)))


def test_column_ranks_together_are_the_whole_layer():
    x, parts, bias = torch.randn(3, 6), [torch.randn(8, 6), torch.randn(4, 6)], torch.randn(12)

    def run(build: Build) -> torch.Tensor:
        return filled(ColumnParallel(build, 6, (8, 4), bias=True), torch.cat(parts), bias)(x)

    pieces = [piece.split((4, 2), -1) for piece in ranks(2, run)]
    for i, expected in enumerate((x @ torch.cat(parts).T + bias).split((8, 4), -1)):
        torch.testing.assert_close(torch.cat([p[i] for p in pieces], -1), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_ranks_each_have_the_whole_sum_with_the_bias_once(size):
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)

    def run(build: Build) -> torch.Tensor:
        layer = filled(RowParallel(build, 8, 5, bias=True), weight, bias)
        return layer(build.mesh.split("inputs", 8).take(x, -1))

    found = ranks(size, run)
    torch.testing.assert_close(found[0], x @ weight.T + bias)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("num_ids", [12, 11, 9])
def test_every_rank_gets_all_logits_of_a_divided_vocabulary(num_ids):
    x, weight, bias = torch.randn(3, 6), torch.randn(num_ids, 6), torch.randn(num_ids)

    def run(build: Build) -> torch.Tensor:
        head = filled(VocabHead(build, 6, num_ids, bias=True), weight, bias)
        return head(x, out_f32=True)

    for found in ranks(4, run):
        torch.testing.assert_close(found, x @ weight.T + bias)


def test_parts_joined_in_one_checkpoint_tensor_are_divided_one_by_one():
    whole = torch.arange(12.0)[:, None]
    layers = [
        filled(ColumnParallel(build(Mesh(rank)), 1, (8, 4)), whole)
        for rank in (UnconnectedRank(2), UnconnectedRank(2, 1))
    ]

    assert layers[0].weight.flatten().tolist() == [0, 1, 2, 3, 8, 9]
    assert layers[1].weight.flatten().tolist() == [4, 5, 6, 7, 10, 11]
    assert layers[0].parts == (4, 2)


def test_a_layer_that_is_not_divided_is_whole_on_every_rank():
    layer = Linear(build(Mesh(UnconnectedRank(2, 1))), 6, (8,), bias=True)

    assert layer.weight.shape == (8, 6)
    assert not splits_of(layer.weight)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"output features \(9\) does not divide by 2 ranks"):
        ColumnParallel(build(Mesh(UnconnectedRank(2))), 6, (8, 9))


def test_outputs_may_be_split_by_hand():
    layer = ColumnParallel(
        build(Mesh(UnconnectedRank(2))), 3, Split(Share(4, 0, 2), Share(1, 0, 1))
    )

    assert layer.weight.shape == (3, 3)
    assert splits_of(layer.weight)[-2].sizes == (2, 1)


def test_float32_output_on_demand():
    layer = ColumnParallel(Build(dtype=torch.bfloat16, length=8), 4, (3,))
    torch.nn.init.ones_(layer.weight)
    x = torch.ones(1, 4, dtype=torch.bfloat16)

    assert layer(x).dtype == torch.bfloat16
    assert layer(x, out_f32=True).dtype == torch.float32


def test_sums_over_ranks_are_rounded_once():
    """In bfloat16 1 + 1/256 is lost if a partial sum is rounded, and kept by float32."""
    weight = torch.ones(1, 4, dtype=torch.bfloat16)
    x = torch.tensor([[1.0, 2**-9, 2**-9, -1.0]], dtype=torch.bfloat16)

    def run(mesh: Mesh) -> torch.Tensor:
        layer = filled(RowParallel(Build(dtype=torch.bfloat16, length=8, mesh=mesh), 4, 1), weight)
        return layer(mesh.split("inputs", 4).take(x, -1))

    for found in on_ranks(2, run):
        assert found.dtype == torch.bfloat16
        assert found.item() == 2**-8
