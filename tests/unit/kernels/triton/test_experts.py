"""The grouped feed-forward of experts against its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from sylvan.kernels.adapters import Factors, LoraLayer, LoraRows, LoraShape
from sylvan.kernels.api import Clamping, DispatchedRows
from sylvan.kernels.experts import ExpertRanks, ExpertWeights, Routing, reference
from sylvan.kernels.experts.triton_experts import experts
from sylvan.runtime.layers.mesh import SingleRank
from tests.support import tensors
from tests.support.chosen import more
from tests.support.tensors import home, put, tolerance


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (tensors.random(*shape, seed=seed) / 4).to(dtype)


def layer(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    return ExpertWeights(
        gate_up=random(5, 2 * 40, 36, dtype=dtype, seed=1),
        down=random(5, 36, 40, dtype=dtype, seed=2),
    )


def biased(weights: ExpertWeights) -> ExpertWeights:
    dtype = weights.gate_up.dtype
    return replace(
        weights,
        gate_up_bias=random(5, 2 * 40, dtype=dtype, seed=3),
        down_bias=random(5, 36, dtype=dtype, seed=4),
        clamping=Clamping(0.3, "gpt_oss", 1.7),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("plain", torch.float32),
        ("plain", torch.float16),
        ("gpt-oss", torch.float32),
        ("llama 4", torch.float32),
        *more(("plain", torch.bfloat16), ("gpt-oss", torch.bfloat16), ("llama 4", torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("count", [19, *more(150, 700)])
def test_rows_visit_their_experts(name: str, dtype: torch.dtype, count: int) -> None:
    weights, routing = layer(dtype), Routing(top_k=2, normalise=True)
    if name == "gpt-oss":
        weights = biased(weights)
    if name == "llama 4":
        routing = Routing(top_k=1, scores="sigmoid", scale_inputs=True)
    x, logits = 4 * random(count, 36, dtype=dtype), random(count, 5, seed=9) * 4
    logits[:, 3] = -50.0  # an expert without rows

    got, load = experts(x, logits, routing, weights)

    want, wanted_load = reference.experts(home(x), home(logits), routing, home(weights))
    limit = tolerance(dtype, 1e-4, 5e-3)
    torch.testing.assert_close(home(got), want, rtol=limit, atol=limit)
    assert torch.equal(home(load), wanted_load)


@pytest.mark.parametrize("dtype", [torch.float16, *more(torch.bfloat16)])
@pytest.mark.parametrize("name", ["plain", "gpt-oss", "llama 4"])
def test_a_single_row_visits_its_experts_without_tiles(name: str, dtype: torch.dtype) -> None:
    weights, routing = layer(dtype), Routing(top_k=2, normalise=True)
    if name == "gpt-oss":
        weights = biased(weights)
    if name == "llama 4":
        routing = Routing(top_k=1, scores="sigmoid", scale_inputs=True)
    x, logits = 4 * random(1, 36, dtype=dtype), random(1, 5, seed=9) * 4
    before = put(torch.arange(5, dtype=torch.int64))

    got, load = experts(x, logits, routing, weights)
    _, total = experts(x, logits, routing, weights, before.clone())

    want, wanted_load = reference.experts(home(x), home(logits), routing, home(weights))
    limit = tolerance(dtype, 1e-4, 5e-3)
    torch.testing.assert_close(home(got), want, rtol=limit, atol=limit)
    assert torch.equal(home(load), wanted_load)
    assert torch.equal(total, before + load)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, logits, routing = random(7, 36), random(7, 5, seed=9), Routing(top_k=2)

    together, _ = experts(x, logits, routing, layer())

    alone, _ = experts(x[3:4], logits[3:4], routing, layer())
    assert torch.equal(alone[0], together[3])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "gpt-oss", "llama 4"])
def test_adapters_change_the_experts_of_their_rows(name: str) -> None:
    weights, routing = layer(), Routing(top_k=2, normalise=True)
    if name == "gpt-oss":
        weights = biased(weights)
    if name == "llama 4":
        routing = Routing(top_k=1, scores="sigmoid", scale_inputs=True)
    x, logits = 4 * random(19, 36), random(19, 5, seed=9) * 4
    rows = LoraRows(2, 32, 8)

    def places(device: torch.device) -> tuple[LoraLayer, LoraLayer]:
        made = (
            LoraLayer(rows, LoraShape(36, (40, 40), num_experts=5), torch.float32, device),
            LoraLayer(rows, LoraShape(40, (36,), num_experts=5), torch.float32, device),
        )
        for there in made:
            parts = [
                there.prepare(
                    Factors(
                        home(random(4, there.inputs, seed=number)),
                        home(random(size, 4, seed=number + 50)),
                        0.5,
                    )
                )
                for number, size in enumerate(there.outputs * 5)
            ]
            there.load(1, parts)
        return made

    mine, theirs = places(x.device), places(torch.device("cpu"))
    plain, _ = experts(x, logits, routing, replace(weights, lora=mine))
    rows.assign([(1, 3, 9)])

    got, _ = experts(x, logits, routing, replace(weights, lora=mine))

    want, _ = reference.experts(home(x), home(logits), routing, replace(home(weights), lora=theirs))
    torch.testing.assert_close(home(got), want, rtol=1e-4, atol=1e-4)
    others = [*range(3), *range(9, 19)]
    assert torch.equal(home(got)[others], home(plain)[others])
    assert (home(got)[3:9] != home(plain)[3:9]).any(1).all()


class Partial:
    """One of two ranks, alone: a sum over ranks is its part of it."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Padded:
    """A `RowDispatcher` of one rank, with room for more rows than come."""

    def reserve(self, columns, top_k, dtype):
        """Nothing to do."""

    def dispatch(self, x_TD, slots_TK, weights_TK, num_slots):
        more = (0, 0, 0, 3)
        x_RD = functional.pad(x_TD, more, value=float("nan"))
        ids_RK = functional.pad(slots_TK, more, value=-1)
        return DispatchedRows(x_RD, ids_RK, functional.pad(weights_TK, more), len(x_TD))

    def combine(self, sums_RD, handle):
        return sums_RD[:handle]


@pytest.mark.parametrize("scale_inputs", [False, True])
def test_rows_that_were_dispatched_are_added_up(scale_inputs: bool) -> None:
    whole = ExpertWeights(gate_up=random(6, 80, 36, seed=1), down=random(6, 36, 40, seed=2))
    routing = Routing(top_k=1 if scale_inputs else 3, scale_inputs=scale_inputs)
    x, logits = 4 * random(19, 36), random(19, 6, seed=9) * 4
    expected, load = reference.experts(home(x), home(logits), routing, home(whole))
    slots = put(torch.arange(6, dtype=torch.int32)[:, None])
    expert_ranks = ExpertRanks(
        ranks=SingleRank(), groups=1, per_group=6, slots_EC=slots, dispatcher=Padded()
    )

    found, seen = experts(x, logits, routing, replace(whole, expert_ranks=expert_ranks))

    assert torch.equal(home(seen), load)
    assert (home(found) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("count", [1, 19])
@pytest.mark.parametrize("scale_inputs", [False, True])
def test_each_rank_adds_up_the_experts_that_it_has(count: int, scale_inputs: bool) -> None:
    whole = ExpertWeights(gate_up=random(6, 80, 36, seed=1), down=random(6, 36, 40, seed=2))
    routing = Routing(top_k=1 if scale_inputs else 3, scale_inputs=scale_inputs)
    x, logits = 4 * random(count, 36), random(count, 6, seed=9) * 4
    expected, load = reference.experts(home(x), home(logits), routing, home(whole))
    slots = put(torch.arange(6, dtype=torch.int32)[:, None])
    total = torch.zeros_like(x)
    for rank in range(2):
        own = slice(3 * rank, 3 * rank + 3)
        expert_ranks = ExpertRanks(ranks=Partial(rank), groups=2, per_group=3, slots_EC=slots)
        mine = replace(
            whole, gate_up=whole.gate_up[own], down=whole.down[own], expert_ranks=expert_ranks
        )

        part, seen = experts(x, logits, routing, mine)

        total += part
        assert torch.equal(home(seen), load)
    assert (home(total) - expected).abs().max() < 1e-4
