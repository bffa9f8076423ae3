"""Products of 8-bit floats against their reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sylvan.kernels.matmul.triton_fp8 import fp8_product, quantised_rows, rounded
from sylvan.kernels.matmul.triton_linear import linear
from sylvan.kernels.matmul.weights import takes_fp8
from tests.support.chosen import more, on_gpu
from tests.support.coded import coded
from tests.support.tensors import fp8, home, put, random

GROUPS = pytest.mark.parametrize("group", [0, 128])


def reference(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3 by PyTorch's own rounding, as float32, and their scales."""
    parts = home(x).float().unflatten(-1, (-1, group or x.shape[-1]))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.full((1,), 448.0)
    return (parts / scale).to(torch.float8_e4m3fn).float().flatten(1), scale.flatten(1)


def rows(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Sizes of all magnitudes, a row of zeros, and numbers too small for e4m3 beside large ones."""
    x = random(count, inputs, dtype=torch.float32, seed=0)
    x = x * torch.linspace(-12, 4, inputs, device=x.device).exp2()
    x[1] = 0.0
    return x.to(dtype)


@GROUPS
@pytest.mark.parametrize("dtype", [torch.float16, *more(torch.bfloat16)])
def test_rows_are_rounded_as_pytorch_rounds(group: int, dtype: torch.dtype) -> None:
    fp8()
    x = rows(3, 1280, dtype)

    q, scale = quantised_rows(x, group)

    wanted, scales = reference(x, group)
    assert torch.equal(home(q).float(), wanted)
    assert torch.equal(home(scale), scales)
    back = (wanted.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)
    assert torch.equal(home(rounded(x, group)), back.to(dtype))


@GROUPS
@pytest.mark.parametrize(("count", "outputs"), [(35, 48), *more((300, 400))])
def test_products(group: int, count: int, outputs: int) -> None:
    fp8()
    x, bias = random(count, 256, dtype=torch.float16, seed=0), random(outputs, seed=1)
    weight = coded("fp8 blocks" if group else "fp8", outputs, 256)
    q, scale = quantised_rows(x, group)

    got = fp8_product(q, scale, put(weight), bias, torch.float32)

    numbers, scales = reference(x, group)
    whole = numbers.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    want = whole.flatten(1).double() @ weight.numbers().double().T + home(bias).double()
    # A Hopper GPU adds up such products in some 14 bits (arXiv:2412.19437, section 3.5.2).
    assert (home(got).double() - want).norm() < (2e-3 if on_gpu() else 1e-5) * want.norm()


@GROUPS
def test_a_layer_rounds_few_rows_and_many_alike(group: int) -> None:
    fp8()
    weight = replace(coded("fp8 blocks" if group else "fp8", 48, 256), fp8_inputs=True)
    x = random(80, 256, dtype=torch.float16, seed=0)

    together = home(linear(x, put(weight), None, out_f32=True))

    alone = home(linear(x[7:8], put(weight), None, out_f32=True))[0]
    exact = (home(x).double() @ weight.numbers().double().T)[7]
    apart, lost = (alone - together[7]).norm(), (alone - exact).norm()
    assert apart < 1e-3 * exact.norm()  # of rounding to float16 and back
    assert 0.01 * exact.norm() < lost < 0.1 * exact.norm()


def test_which_matrices_fit() -> None:
    assert takes_fp8(coded("fp8", 48, 256))
    assert takes_fp8(coded("fp8 blocks", 48, 256))
    assert not takes_fp8(coded("fp8", 40, 256))
    assert not takes_fp8(coded("fp8", 48, 160))
    assert not takes_fp8(coded("fp8_e4m3", 48, 256, group=32))
    assert not takes_fp8(coded("int8 g128", 48, 256))
