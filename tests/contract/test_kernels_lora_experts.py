"""Adapters of experts: the native ops against the reference, and rows in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.adapters import Factors, LoraLayer, LoraRows, LoraShape
from sylvan.kernels.api import ExpertWeights, Routing
from sylvan.kernels.experts import reference
from sylvan.kernels.matmul.weights import quantise_int4, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from tests.contract.test_kernels_experts import packable, stacks
from tests.support.native import DTYPES, NativeOp, random, variants

EXPERTS, DIM, INNER, ROWS = 12, 64, 96, 150
RANKS = (1, 16, 33)  # of slots; the last one is empty
ROUTINGS = {
    "three": Routing(top_k=3, normalise=True),
    "all": Routing(top_k=EXPERTS, normalise=True),
    "inputs scaled": Routing(top_k=1, scores="sigmoid", scale_inputs=True),
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


def places(rows: LoraRows, dtype: torch.dtype) -> tuple[LoraLayer, LoraLayer]:
    """Of a layer of experts, for adapters of both products."""
    cpu = torch.device("cpu")
    return (
        LoraLayer(rows, LoraShape(DIM, (INNER, INNER), num_experts=EXPERTS), dtype, cpu),
        LoraLayer(rows, LoraShape(INNER, (DIM,), num_experts=EXPERTS), dtype, cpu),
    )


def fill(layer: LoraLayer) -> None:
    """Adapters in all slots but the last; each changes most of the matrices."""
    for slot, rank in enumerate(RANKS):
        parts = []
        for number in range(layer.shape.num_parts):
            size = layer.outputs[number % len(layer.outputs)]
            seed = 1000 * slot + number
            down = random(rank, layer.inputs, dtype=torch.float32, seed=seed, scale=0.2)
            up = random(size, rank, dtype=torch.float32, seed=seed + 500, scale=0.3)
            is_changed = (slot + number) % 5 != 4
            parts.append(layer.prepare(Factors(down, up, 0.7)) if is_changed else None)
        layer.load(slot, parts)


class Case:
    """A layer of experts with adapters in slots, natively and by the reference."""

    def __init__(
        self, library: Library, dtype: torch.dtype, weights: ExpertWeights, routing: Routing
    ) -> None:
        self.dtype, self.routing = dtype, routing
        self.rows = LoraRows(len(RANKS) + 1, ROWS, 40)
        mine, theirs = places(self.rows, dtype), places(self.rows, dtype)
        self.mine, self.theirs = mine, replace(weights, lora=theirs)
        dense = isinstance(weights.gate_up, torch.Tensor)
        given = replace(packable(weights) if dense else weights, lora=mine)
        self.op = NativeOp(
            library,
            dtype,
            lambda t, x, logits: ops.experts(x, logits, routing, given),
            self.inputs(1),
        )
        for layer in (*mine, *theirs):
            fill(layer)

    def inputs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = random(ROWS, EXPERTS, dtype=torch.float32, seed=9, scale=2.0)
        return random(ROWS, DIM, dtype=self.dtype, seed=8)[:count], logits[:count]

    def run(self, x: torch.Tensor, logits: torch.Tensor, spans: list[tuple[int, int, int]]):
        self.rows.assign(spans)
        self.op.write(x, logits)
        return self.op.run(StepRun(tokens=len(x)))


SPANS = (
    [(1, 0, 1)],
    [(0, 2, 5), (2, 5, 6), (1, 9, 100), (3, 110, 120), (2, 130, 150)],
    [],
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_as_the_reference(library: Library, name: str, dtype: torch.dtype) -> None:
    case = Case(library, dtype, stacks(dtype), ROUTINGS[name])
    x, logits = case.inputs(ROWS)
    plain = case.run(x, logits, []).clone()
    for spans in SPANS:
        found = case.run(x, logits, spans).clone()

        want, _ = reference.experts(x, logits, case.routing, case.theirs)
        size = float(want.abs().max())
        limit = 1e-4 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(found.float(), want.float(), rtol=limit, atol=size * limit)
        others = torch.ones(ROWS, dtype=torch.bool)
        for slot, start, stop in spans:
            others[start:stop] = slot == len(RANKS)
        assert torch.equal(found[others], plain[others]), "rows without an adapter"
        assert (found[~others] != plain[~others]).any(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_bits_of_a_row_depend_on_no_other_row(
    library: Library, bits: int, dtype: torch.dtype
) -> None:
    weights = stacks(dtype)
    if bits:
        rounded = quantise_int8 if bits == 8 else lambda stack: quantise_int4(stack, 32)
        weights = replace(
            weights, gate_up=rounded(weights.gate_up.float()), down=rounded(weights.down.float())
        )
    case = Case(library, dtype, weights, ROUTINGS["three"])
    x, logits = case.inputs(ROWS)
    whole = case.run(x, logits, [(1, 0, 70), (2, 70, 140), (1, 140, 150)]).clone()

    for row, slot in ((0, 1), (69, 1), (70, 2), (101, 2), (149, 1)):
        alone = case.run(x[row : row + 1], logits[row : row + 1], [(slot, 0, 1)])
        assert torch.equal(alone[0], whole[row])
    library.dll.sylvan_threads(1)
    assert torch.equal(case.run(x, logits, [(2, 70, 140), (1, 140, 150), (1, 0, 70)]), whole)
