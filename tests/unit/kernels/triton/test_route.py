"""Routing against its definition, and the places of its pairs."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.experts import Routing
from sylvan.kernels.experts import routing as reference
from sylvan.kernels.experts.triton_places import ExpertTiles
from sylvan.kernels.experts.triton_route import route
from tests.support import tensors
from tests.support.tensors import home, put

BIAS = torch.linspace(-0.3, 0.3, 12)
ROUTINGS = {
    "softmax": Routing(top_k=3),
    "qwen 3": Routing(top_k=4, normalise=True),
    "gpt-oss": Routing(top_k=4, scores="softmax_chosen"),
    "llama 4": Routing(top_k=1, scores="sigmoid", scale_inputs=True),
    "deepseek v2": Routing(top_k=4, groups=3, kept_groups=2, scale=16.0),
    "deepseek v3": Routing(
        top_k=3,
        scores="sigmoid",
        normalise=True,
        scale=2.5,
        bias=BIAS,
        groups=3,
        kept_groups=2,
        group_rank="best_two",
    ),
    "phi": Routing(top_k=2, scores="sparsemixer"),
    "all of them": Routing(top_k=12, normalise=True),
}


def random(rows: int, experts: int = 12) -> torch.Tensor:
    return 3 * tensors.random(rows, experts, seed=rows)


def check(logits: torch.Tensor, routing: Routing) -> None:
    ids, weights = route(logits, put(routing))

    wanted_ids, wanted = reference.route(home(logits), routing)
    assert torch.equal(home(ids).long(), wanted_ids)
    torch.testing.assert_close(home(weights), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_launch_gives_what_the_definition_says(name: str) -> None:
    check(random(13), ROUTINGS[name])


def test_rows_may_lie_apart_and_experts_be_any_number() -> None:
    check(random(3, 40)[:, 3:36], ROUTINGS["qwen 3"])  # one row a program, no power of two


@pytest.mark.parametrize("name", ["qwen 3", "gpt-oss", "deepseek v3"])
def test_among_equals_the_lowest_numbers_are_chosen(name: str) -> None:
    logits = put(torch.zeros(2, 12))
    logits[0, 1::2] = -0.0  # the same number
    routing = ROUTINGS[name]
    if routing.bias is not None:
        routing = Routing(top_k=3, scores="sigmoid", groups=3, kept_groups=2, normalise=True)

    ids, weights = route(put(logits), routing)

    assert ids.tolist() == [list(range(routing.top_k))] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / routing.top_k))


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "phi"])
def test_rubbish_gives_distinct_experts_that_exist(name: str) -> None:
    nan, inf = float("nan"), float("inf")
    logits = random(6)
    logits[0], logits[1], logits[2] = nan, inf, -inf
    logits[3, ::2], logits[4, 5:] = nan, -inf

    ids, _ = route(logits, put(ROUTINGS[name]))

    for row in ids.tolist():
        assert row == sorted(set(row))
        assert 0 <= row[0] <= row[-1] < 12
    wanted_ids, _ = reference.route(home(logits[5:]), ROUTINGS[name])
    assert torch.equal(home(ids[5:]).long(), wanted_ids)  # whatever the others are


@pytest.mark.parametrize(("rows", "top_k"), [(1, 2), (300, 2), (2100, 2)])
def test_each_tile_of_places_has_one_owner(rows: int, top_k: int) -> None:
    ids, _ = reference.route(home(random(rows, 5)), Routing(top_k=top_k))
    ids[ids == 3] = 4  # an expert without pairs

    places = ExpertTiles.of(put(ids.int()), 5, 16)

    tiles, owners, load = home(places.pairs).view(-1, 16), home(places.owners), home(places.load_E)
    assert len(owners) == places.row_tiles
    assert torch.equal(load, ids.flatten().bincount(minlength=5))
    used = tiles[owners >= 0]
    assert sorted(used[used >= 0].tolist()) == list(range(rows * top_k))
    for tile, owner in zip(used, owners[owners >= 0], strict=True):
        assert (ids.flatten()[tile[tile >= 0].long()] == owner).all()
    assert int((owners >= 0).sum()) == int((-(-load // 16)).sum())
