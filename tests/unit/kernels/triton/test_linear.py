"""Linear layers of one row against their reference, of more rows on a GPU only."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.gating.triton_gating import glu
from sylvan.kernels.matmul import reference
from sylvan.kernels.matmul.triton_linear import gated_linear, linear
from sylvan.kernels.matmul.weights import quantise_int8
from tests.support.chosen import more
from tests.support.tensors import DTYPES, home, put, random, tolerance


@pytest.mark.parametrize("out_f32", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 12), (2048, 7), (100, 9), (1500, 8)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("count", [1, *more(5)])
def test_a_row_is_the_product(
    inputs: int, outputs: int, bias: bool, out_f32: bool, dtype: torch.dtype, count: int
) -> None:
    x = random(count, inputs, dtype=dtype, seed=0)
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    add = random(outputs, dtype=dtype, seed=2) if bias else None

    got = linear(x, weight, add, out_f32=out_f32)

    want = x.double() @ weight.double().T + (0 if add is None else add.double())
    assert got.dtype == (torch.float32 if out_f32 else dtype)
    limit = tolerance(got.dtype, 1e-5, 2e-3)
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit * inputs**0.5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "inner"), [(1024, 6), (1500, 7)])
@pytest.mark.parametrize("count", [1, *more(5)])
def test_a_gated_row_has_the_bits_of_a_product_and_a_gate(
    inputs: int, inner: int, bias: bool, count: int
) -> None:
    x = random(count, inputs, dtype=torch.float16, seed=0)
    weight = random(2 * inner, inputs, dtype=torch.float16, seed=1)
    add = random(2 * inner, dtype=torch.float16, seed=2) if bias else None

    got = gated_linear(x, weight, add, "gelu_tanh")

    assert torch.equal(got, glu(linear(x, weight, add, out_f32=False), "gelu_tanh"))


def test_other_weights_take_the_way_of_the_reference() -> None:
    x = random(1, 64, dtype=torch.float32, seed=0)
    weight = random(16, 64, dtype=torch.float32, seed=1)
    small = put(quantise_int8(home(weight)))

    assert linear(x, weight, None, out_f32=True).equal(
        reference.linear(x, weight, None, out_f32=True)
    )
    assert linear(x, small, None, out_f32=False).equal(
        reference.linear(x, small, None, out_f32=False)
    )
