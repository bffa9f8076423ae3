"""GPTQ loses less of what a layer gives than rounding each number by itself."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.matmul.gptq import Moments, gptq_int4
from sylvan.kernels.matmul.weights import quantise_int4_codes


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(inputs: int, x: torch.Tensor) -> Moments:
    moments = Moments(inputs)
    for part in x.split(100):
        moments.add(part)
    return moments


@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (96, 32)])
def test_outputs_for_such_rows_change_less(inputs, group):
    mixed = normal(inputs // 4, inputs, seed=1)  # inputs that vary together
    x = normal(600, inputs // 4, seed=2) @ mixed + 0.1 * normal(600, inputs, seed=3)
    weight = normal(48, inputs, seed=4)

    found = gptq_int4(weight, read(inputs, x), group)

    def loss(made) -> float:
        return float(((x @ (made.numbers() - weight).T) ** 2).sum())

    assert found.shape == weight.shape
    assert found.group == group
    assert loss(found) < 0.6 * loss(quantise_int4_codes(weight, group))


def test_inputs_that_vary_by_themselves_are_rounded_by_themselves():
    weight, moments = normal(48, 256, seed=1), Moments(256)
    moments.sums = torch.eye(256)

    found, plain = gptq_int4(weight, moments, 64), quantise_int4_codes(weight, 64)

    assert torch.equal(found.scale, plain.scale)
    apart = (found.numbers() - weight).abs() - (plain.numbers() - weight).abs()
    assert apart.abs().max() < 2e-3, "but for scales, which are float16 before and after"


def test_inputs_that_were_always_zero_do_no_harm():
    x = normal(200, 64, seed=1)
    x[:, 5] = 0.0

    found = gptq_int4(normal(16, 64, seed=2), read(64, x), 32)

    assert found.numbers().isfinite().all()


def test_rows_that_are_no_numbers_are_refused():
    moments = read(64, torch.full((3, 64), float("inf")))

    with pytest.raises(ValueError, match="not finite"):
        gptq_int4(normal(16, 64, seed=2), moments, 32)
