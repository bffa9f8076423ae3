"""Matrices of codes on GPUs against their reference."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from sylvan.kernels.gpu.tiles import Tile
from sylvan.kernels.matmul.codes import Code, packed_bits_of, paired
from sylvan.kernels.matmul.triton_codes import expanded
from sylvan.kernels.matmul.triton_few import FEW, few_rows
from sylvan.kernels.matmul.triton_linear import linear
from sylvan.kernels.matmul.weights import CodedWeight
from tests.support.chosen import more, on_gpu
from tests.support.coded import KINDS, coded
from tests.support.tensors import DTYPES, home, put, random


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, torch.float16),
        (35, torch.float32),
        *more((1, torch.bfloat16), (16, torch.bfloat16), (300, torch.bfloat16)),
    ],
)
def test_rows_times_codes(kind: str, count: int, dtype: torch.dtype) -> None:
    x, weight = random(count, 160, dtype=dtype, seed=0) / 4, coded(kind, 40, 160)
    bias = random(40, dtype=dtype, seed=2)

    got = linear(x, put(weight), bias, out_f32=True)

    numbers = weight.numbers().double()
    if count > FEW or dtype == torch.float32:  # else sums of groups are scaled
        numbers = weight.numbers().to(dtype).double()  # rounded once to the type of the rows
    want = home(x).double() @ numbers.T + home(bias).double()
    torch.testing.assert_close(home(got).double(), want, rtol=1e-4, atol=1e-3)
    assert linear(x, put(weight), None, out_f32=False).dtype == dtype


@pytest.mark.parametrize("kind", ["int4 g128 zeros", "uint4 g32 shifts", "int8 g128"])
def test_programs_may_share_inputs(kind: str) -> None:
    x, weight = random(5, 1100, dtype=torch.float16, seed=0) / 8, coded(kind, 40, 1100)
    bias = random(40, dtype=torch.float16, seed=2)
    found = []
    for programs in (0, 4):
        y = torch.empty(5, 40, device=x.device)
        sizes = Tile(16, 32, 128, programs=programs)
        few_rows(x, put(weight), bias, y, sizes, ptx=on_gpu())
        found.append(home(y))

    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)
    assert not torch.equal(found[1], found[0])


@pytest.mark.parametrize("kind", ["int4 f32 zeros", "uint4 g32 shifts", "fp8 blocks", "nvfp4"])
def test_a_matrix_is_expanded(kind: str) -> None:
    weight = coded(kind, 40, 160)

    assert torch.equal(home(expanded(put(weight), torch.float16)), weight.numbers().half())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4 g128 zeros", "fp8 blocks"])
def test_prompts_by_an_expanded_matrix(kind: str) -> None:
    x, weight = random(600, 256, dtype=DTYPES[1], seed=0) / 4, coded(kind, 48, 256)
    bias = random(48, dtype=DTYPES[1], seed=2)

    got = linear(x, put(weight), bias, out_f32=False)

    want = home(x).double() @ weight.numbers().to(x.dtype).double().T + home(bias).double()
    torch.testing.assert_close(home(got).double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("code", get_args(Code))
def test_every_code_stands_for_its_number(code: Code) -> None:
    bits = packed_bits_of(code)
    levels = (torch.arange(256)[None].repeat(16, 1) % (1 << bits)).to(torch.uint8)
    if code == "fp8_e4m3":
        levels[(levels & 127) == 127] = 0  # no numbers
    weight = CodedWeight(paired(levels) if bits == 4 else levels, torch.ones(16, 1), code, 0)

    got = linear(put(torch.eye(256)), put(weight), None, out_f32=True)

    assert torch.equal(home(got), weight.numbers().T)


def test_inputs_in_another_order_are_put_in_it() -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)).int()
    weight = replace(coded("int4", 40, 96, group=32), order=order)
    x = random(3, 96, seed=0)

    got = linear(x, put(weight), None, out_f32=True)

    want = home(x).double() @ weight.numbers().double().T
    torch.testing.assert_close(home(got).double(), want, rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(12, 128, dtype=DTYPES[1], seed=0), put(coded("int4 g32", 48, 128))

    together = linear(x, weight, None, out_f32=True)

    assert torch.equal(linear(x[7:8], weight, None, out_f32=True)[0], together[7])
