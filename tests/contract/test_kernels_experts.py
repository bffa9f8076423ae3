"""Native mixtures of experts against the reference, and rows against themselves in company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import ClampForm, Clamping, ExpertWeights, LinearWeight, Routing
from sylvan.kernels.experts import reference
from sylvan.kernels.matmul.weights import DeferredWeight, quantise_int4, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.opset import GatherQuantised, GatherRows, Quantise
from tests.support.coded import coded
from tests.support.native import DTYPES, NativeOp, assert_close, native, random, variants

EXPERTS, DIM, INNER, ROWS = 12, 64, 96, 150
ROUTINGS = {
    "softmax": Routing(top_k=3),
    "softmax, normalised": Routing(top_k=3, normalise=True, scale=2.5),
    "of the chosen": Routing(top_k=2, scores="softmax_chosen"),
    "groups by their best": Routing(top_k=2, groups=4, kept_groups=2, scale=1.5),
    "groups by their two best": Routing(
        top_k=4,
        scores="sigmoid",
        normalise=True,
        groups=4,
        kept_groups=2,
        group_rank="best_two",
        bias=random(EXPERTS, dtype=torch.float32, seed=5),
    ),
    "sparse mixer": Routing(top_k=2, scores="sparsemixer", jitter=0.3),
    "inputs scaled": Routing(top_k=1, scores="sigmoid", scale_inputs=True),
    "all experts": Routing(top_k=EXPERTS, normalise=True),
    "roots of softplus": Routing(
        top_k=3,
        scores="sqrt_softplus",
        normalise=True,
        scale=1.5,
        bias=random(EXPERTS, dtype=torch.float32, seed=6),
    ),
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


def stacks(dtype: torch.dtype, inner: int = INNER, *, biased: bool = False) -> ExpertWeights:
    return ExpertWeights(
        gate_up=random(EXPERTS, 2 * inner, DIM, dtype=dtype, seed=1, scale=0.2),
        down=random(EXPERTS, DIM, inner, dtype=dtype, seed=2, scale=0.2),
        gate_up_bias=random(EXPERTS, 2 * inner, dtype=dtype, seed=3) if biased else None,
        down_bias=random(EXPERTS, DIM, dtype=dtype, seed=4) if biased else None,
    )


def packable(weights: ExpertWeights) -> ExpertWeights:
    """The same weights to be packed, which empties them, or read when they are needed."""

    def later(stack: LinearWeight | None) -> DeferredWeight | None:
        if not isinstance(stack, torch.Tensor):
            return None
        return DeferredWeight(stack.shape, stack.clone, str(id(stack)))

    copies = {
        side: stack.clone() if isinstance(stack, torch.Tensor) else stack
        for side, stack in (("gate_up", weights.gate_up), ("down", weights.down))
    }
    biases = {f"{side}_bias": later(getattr(weights, f"{side}_bias")) for side in copies}
    return replace(weights, **copies, **biases)


def inputs(dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
    logits = random(rows, EXPERTS, dtype=torch.float32, seed=9, scale=2.0)
    return [random(rows, DIM, dtype=dtype, seed=8), logits]


def tolerant(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Products of rounded products: the last two digits."""
    assert_close(
        got / 2, want / 2, dtype
    ) if dtype == torch.float32 else torch.testing.assert_close(
        got.float(), want.float(), rtol=0.02, atol=float(want.abs().max()) * 0.02
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_go_to_the_experts_of_the_reference(
    library: Library, name: str, dtype: torch.dtype
) -> None:
    weights, routing = stacks(dtype), ROUTINGS[name]
    x, logits = inputs(dtype, ROWS)
    want, wanted_load = reference.experts(x, logits, routing, weights)
    counts = torch.ones(EXPERTS, dtype=torch.int64)
    mine = packable(weights)

    got = native(
        library, dtype, lambda r, v, w: ops.experts(v, w, routing, mine, counts), [x, logits]
    )

    tolerant(got, want, dtype)
    assert torch.equal(counts - 1, wanted_load)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_choose_their_experts(library: Library, dtype: torch.dtype) -> None:
    """By a table; ids behind it are those of its last token."""
    weights, (x, logits) = stacks(dtype), inputs(dtype, 40)
    table = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(17)]).int()
    ids = torch.randint(0, 20, (40,), dtype=torch.int32)
    routing = Routing(top_k=3, scores="sqrt_softplus", normalise=True, scale=1.5)
    chosen = replace(routing, ids=table[ids.clamp(max=16).long()])
    want, wanted_load = reference.experts(x, logits, chosen, weights)
    mine, counts = packable(weights), torch.zeros(EXPERTS, dtype=torch.int64)

    def experts(_, v, w):
        return ops.experts(v, w, replace(routing, by_token=table), mine, counts)

    step = StepRun(tokens=40, ids=ids.data_ptr())
    got = native(library, dtype, experts, [x, logits], step)

    tolerant(got, want, dtype)
    assert torch.equal(counts, wanted_load)


@pytest.mark.parametrize("form", ["gpt_oss", "inputs", "outputs"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_experts_with_biases_equal_the_reference(
    library: Library, dtype: torch.dtype, form: ClampForm
) -> None:
    weights = replace(stacks(dtype, 40, biased=True), clamping=Clamping(1.5, form, 1.702))
    routing = ROUTINGS["of the chosen"]
    x, logits = inputs(dtype, 33)
    want, _ = reference.experts(x, logits, routing, weights)
    mine = packable(weights)

    got = native(library, dtype, lambda r, v, w: ops.experts(v, w, routing, mine), [x, logits])

    tolerant(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("kind", ["int4 zeros", "fp8_e4m3"])
def test_coded_experts_equal_the_reference(
    library: Library, kind: str, rows: int, dtype: torch.dtype
) -> None:
    code = kind.split()[0]
    flat = [
        coded(code, EXPERTS * outputs, cols, group=32, seed=seed)
        for seed, (outputs, cols) in enumerate(((2 * INNER, DIM), (DIM, INNER)))
    ]
    if "zeros" in kind:
        flat = [replace(w, zero=torch.full(w.scale.shape, 7, dtype=torch.uint8)) for w in flat]
    gate_up, down = (w.stacked(EXPERTS) for w in flat)
    weights = replace(stacks(dtype), gate_up=gate_up, down=down)
    routing = ROUTINGS["softmax, normalised"]
    x, logits = inputs(dtype, rows)
    want, _ = reference.experts(x, logits, routing, weights)

    got = native(library, dtype, lambda r, v, w: ops.experts(v, w, routing, weights), [x, logits])

    tolerant(got, want, dtype)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_experts_equal_the_reference(library: Library, bits: int, rows: int) -> None:
    dense = stacks(torch.float32)
    round_ = quantise_int8 if bits == 8 else lambda stack: quantise_int4(stack, 32)
    weights = replace(dense, gate_up=round_(dense.gate_up), down=round_(dense.down))
    routing = ROUTINGS["softmax, normalised"]
    x, logits = inputs(torch.float32, rows)
    want, _ = reference.experts(x, logits, routing, weights)

    got = native(
        library, torch.float32, lambda r, v, w: ops.experts(v, w, routing, weights), [x, logits]
    )

    # A level of a row may round to the other side of a half.
    torch.testing.assert_close(got, want, rtol=0.01, atol=float(want.abs().max()) * 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_row_has_the_same_bits_in_any_company(
    library: Library, bits: int, dtype: torch.dtype
) -> None:
    weights, routing = stacks(dtype, biased=True), ROUTINGS["groups by their two best"]
    if bits:
        round_ = quantise_int8 if bits == 8 else lambda stack: quantise_int4(stack, 32)
        weights = replace(weights, gate_up=round_(weights.gate_up), down=round_(weights.down))
    mine, together = packable(weights), inputs(dtype, ROWS)
    op = NativeOp(library, dtype, lambda r, v, w: ops.experts(v, w, routing, mine), together)
    op.write(*together)
    whole = op.run(StepRun(tokens=ROWS))

    for first, last in ((0, 1), (70, 73), (60, 90), (149, 150)):
        op.write(*(x[first:last] for x in together))
        assert torch.equal(op.run(StepRun(tokens=last - first)), whole[first:last])


def test_logits_that_are_no_numbers_choose_some_experts(library: Library) -> None:
    x, logits = inputs(torch.float32, 3)
    logits[1] = float("nan")
    weights, counts = packable(stacks(torch.float32)), torch.zeros(EXPERTS, dtype=torch.int64)
    routing = ROUTINGS["groups by their two best"]

    got = native(
        library,
        torch.float32,
        lambda r, v, w: ops.experts(v, w, routing, weights, counts),
        [x, logits],
    )

    assert got[[0, 2]].isfinite().all()
    assert counts.sum() == 3 * routing.top_k


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_by_their_factors(library: Library, dtype: torch.dtype) -> None:
    x, factors = random(5, 50, dtype=dtype), random(5, 1, dtype=dtype, seed=1)

    got = native(library, dtype, lambda r, v, f: ops.scale_rows(v, f), [x, factors])

    assert torch.equal(got, ops.scale_rows(x, factors))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_quantised_once_for_all_its_experts(library: Library, bits: int) -> None:
    weights, routing = stacks(torch.float32), ROUTINGS["softmax"]
    round_ = quantise_int8 if bits == 8 else lambda stack: quantise_int4(stack, 32)
    weights = replace(weights, gate_up=round_(weights.gate_up), down=round_(weights.down))
    rows = inputs(torch.float32, ROWS)

    op = NativeOp(library, torch.float32, lambda r, v, w: ops.experts(v, w, routing, weights), rows)

    kinds = [type(one) for one in op.program.ops]
    assert (kinds.count(Quantise), kinds.count(GatherQuantised)) == (1, 1)
    assert GatherRows not in kinds
    assert op.program.ops[kinds.index(Quantise)].times == 1
