"""Quantised experts on GPUs against their reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sylvan.kernels.api import Clamping
from sylvan.kernels.experts import ExpertWeights, Routing, reference
from sylvan.kernels.experts.triton_experts import experts
from sylvan.kernels.matmul.weights import CodedWeight, takes_fp8
from tests.support.chosen import more
from tests.support.coded import KINDS, coded
from tests.support.tensors import fp8, home, put, random

GPT_OSS = Clamping(0.3, "gpt_oss", 1.7)
TWO, SCALED = (
    Routing(top_k=2, normalise=True),
    Routing(top_k=1, scores="sigmoid", scale_inputs=True),
)


def stack(kind: str, rows: int, cols: int) -> CodedWeight:
    """Five matrices; those of e4m3, whose codes go up to 448, with scales for float16 results."""
    parts = [coded(kind, rows, cols, seed=seed) for seed in range(5)]
    if parts[0].code == "fp8_e4m3":
        parts = [replace(part, scale=part.scale / 64) for part in parts]
    return parts[0].like([torch.stack(x) for x in zip(*(p.tensors for p in parts), strict=True)])


def layer(kind: str, dim: int, inner: int, *, biased: bool = False) -> ExpertWeights:
    weights = ExpertWeights(gate_up=stack(kind, 2 * inner, dim), down=stack(kind, dim, inner))
    if not biased:
        return weights
    bias = home(random(5, 2 * inner, seed=3)) / 4, home(random(5, dim, seed=4)) / 4
    return replace(
        weights, gate_up_bias=bias[0], down_bias=bias[1], clamping=Clamping(0.3, "gpt_oss", 1.7)
    )


def check(
    weights: ExpertWeights, routing: Routing, dtype: torch.dtype, count: int, limit: float
) -> None:
    """Results and counts of rows are those of the reference."""
    x = random(count, weights.down.shape[1], dtype=dtype, seed=0) / 8
    logits = random(count, 5, seed=9) * 4

    got, load = experts(x, logits, routing, put(weights))

    exact = replace(
        weights,
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.float(),
    )
    want, wanted_load = reference.experts(home(x).float(), home(logits), routing, exact)
    apart = (home(got).float() - want).norm() / want.norm()
    assert apart < limit
    assert torch.equal(home(load), wanted_load)


@pytest.mark.parametrize("kind", ["int4 g32", "nvfp4", "fp8", "uint4 g32 shifts"])
def test_tiles_of_float32(kind: str) -> None:
    check(layer(kind, 64, 32), TWO, torch.float32, 19, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.float16), *more((19, torch.float16), (1, torch.bfloat16), (40, torch.bfloat16))],
)
def test_few_rows_are_multiplied_by_codes(kind: str, count: int, dtype: torch.dtype) -> None:
    check(layer(kind, 160, 96), TWO, dtype, count, 2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.parametrize("kind", ["int4 g32", "int8 zeros"])
@pytest.mark.parametrize(("biased", "routing"), [(True, TWO), (False, SCALED)])
def test_few_rows_of_experts_with_biases_and_of_scaled_inputs(
    kind: str, biased: bool, routing: Routing
) -> None:
    check(layer(kind, 64, 96, biased=biased), routing, torch.float16, 7, 2e-3)


@pytest.mark.parametrize("kind", ["int4 g128 zeros", *more("nvfp4", "fp8 blocks", "nf4")])
def test_many_rows_are_multiplied_by_expanded_tiles(kind: str) -> None:
    check(layer(kind, 128, 128), TWO, torch.float16, 60, 2e-3)


def test_few_rows_do_not_depend_on_the_others() -> None:
    weights = put(layer("int4 g32", 64, 96))
    x, logits = random(7, 64, dtype=torch.float16, seed=0), random(7, 5, seed=9)

    together, _ = experts(x, logits, TWO, weights)

    alone, _ = experts(x[3:4], logits[3:4], TWO, weights)
    assert torch.equal(alone[0], together[3])


def test_inputs_in_another_order_are_put_in_it() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    weights = layer("int4 g32", 64, 96)

    check(
        replace(weights, gate_up=replace(weights.gate_up, order=order)), TWO, torch.float16, 7, 2e-3
    )


@pytest.mark.parametrize(
    ("kind", "count", "routing"),
    [
        ("fp8 blocks", 41, TWO),
        ("fp8", 3, SCALED),
        *more(("fp8", 41, TWO), ("fp8 blocks", 3, TWO), ("fp8 blocks", 90, SCALED)),
    ],
)
def test_rows_of_experts_are_rounded_to_8_bit_floats(
    kind: str, count: int, routing: Routing
) -> None:
    """However many they are: as by the reference on rows rounded by the same steps."""
    fp8()
    weights = layer(kind, 256, 128)
    weights = replace(
        weights,
        gate_up=replace(weights.gate_up, fp8_inputs=True),
        down=replace(weights.down, fp8_inputs=True),
    )
    assert takes_fp8(weights.gate_up)
    x = random(count, 256, dtype=torch.float16, seed=0) / 8
    logits = random(count, 5, seed=9) * 4

    got, load = experts(x, logits, routing, put(weights))

    alone = torch.cat(
        [experts(x[i : i + 1], logits[i : i + 1], routing, put(weights))[0] for i in (0, 2)]
    )
    plain, wanted = reference.experts(home(x).float(), home(logits), routing, weights)
    assert torch.equal(home(load), wanted)
    assert (home(got)[[0, 2]].float() - home(alone).float()).norm() < 2e-3 * plain[[0, 2]].norm()
    lost = (home(got).float() - plain).norm() / plain.norm()
    assert 0.005 < lost < 0.1
