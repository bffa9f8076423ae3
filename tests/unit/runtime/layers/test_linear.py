from __future__ import annotations

import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build, Shard
from sylvan.runtime.layers.linear import ColumnParallel, Linear, RowParallel


def build(rank: int = 0, size: int = 1) -> Build:
    return Build(dtype=torch.float32, length=8, shard=Shard(rank, size))


def filled(layer: Linear, parts: list[torch.Tensor], bias: torch.Tensor | None = None) -> Linear:
    layer.weight.data.copy_(torch.cat([layer.divide(part) for part in parts]))
    if bias is not None:
        layer.bias.data.copy_(layer.divide(bias))
    return layer


def test_column_ranks_together_are_the_whole_layer():
    x, parts = torch.randn(3, 6), [torch.randn(8, 6), torch.randn(4, 6)]
    whole = [x @ part.T for part in parts]

    ranks = [filled(ColumnParallel(build(r, 2), 6, (8, 4)), parts) for r in (0, 1)]

    pieces = [rank(x).split(rank.parts, -1) for rank in ranks]
    for i, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([p[i] for p in pieces], -1), expected)


def test_row_ranks_sum_to_the_whole_layer():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)

    ranks = [filled(RowParallel(build(r, 4), 8, 5), [weight]) for r in range(4)]

    total = sum(rank(part) for rank, part in zip(ranks, x.chunk(4, -1), strict=True))
    torch.testing.assert_close(total, x @ weight.T)


def test_a_row_bias_is_whole_on_every_rank():
    layer, bias = RowParallel(build(1, 2), 8, 5, bias=True), torch.randn(5)

    assert layer.divide(bias).equal(bias)
    assert layer.bias.shape == (5,)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"output features \(9\) does not divide by 2 ranks"):
        ColumnParallel(build(0, 2), 6, (8, 9))


def test_float32_output_on_demand():
    layer = ColumnParallel(Build(dtype=torch.bfloat16, length=8), 4, (3,))
    torch.nn.init.ones_(layer.weight)
    x = torch.ones(1, 4, dtype=torch.bfloat16)

    assert layer(x).dtype == torch.bfloat16
    assert layer(x, out_f32=True).dtype == torch.float32
