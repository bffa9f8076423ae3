"""Norms, non-linearities and row operations against their references."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.api import ClampForm, Clamping
from sylvan.kernels.embed import reference as embed
from sylvan.kernels.embed.triton_embed import embedding
from sylvan.kernels.gating import reference as gating
from sylvan.kernels.gating.triton_gating import activation, glu
from sylvan.kernels.matmul.weights import quantise_int8
from sylvan.kernels.norm import reference as norm
from sylvan.kernels.norm.triton_norm import layer_norm, rms_norm
from sylvan.kernels.rows import reference as rows
from sylvan.kernels.rows.triton_rows import add, scale, softcap, take_rows
from tests.support.chosen import more
from tests.support.tensors import DTYPES, home, ints, put, random, tolerance

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
KINDS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu"]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    limit = tolerance(want.dtype, 1e-5, 2e-3)
    torch.testing.assert_close(got, want, rtol=limit, atol=limit)


@EACH_DTYPE
@pytest.mark.parametrize("width", [64, 100, *more(4096, 5000)])
def test_rms_norm_adds_to_the_residual_and_norms(dtype: torch.dtype, width: int) -> None:
    x, weight = random(5, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    residual = random(5, width, seed=2)

    want = norm.rms_norm(x, weight, 1e-6, residual, 1.0)
    got = rms_norm(x, weight, 1e-6, residual, 1.0)

    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)
    assert got[1].data_ptr() == residual.data_ptr()  # no new memory for the stream


@EACH_DTYPE
def test_rms_norm_starts_a_float32_residual(dtype: torch.dtype) -> None:
    x, weight = random(3, 96, dtype=dtype), random(96, dtype=torch.float16)

    for got, want in zip(
        rms_norm(x, weight, 1e-5, None, 0.0),
        norm.rms_norm(x, weight, 1e-5, None, 0.0),
        strict=True,
    ):
        close(got, want)


@EACH_DTYPE
@pytest.mark.parametrize("given", ["weight and bias", "weight", "neither"])
def test_layer_norm_removes_the_mean(dtype: torch.dtype, given: str) -> None:
    x, residual = random(4, 72, dtype=dtype) + 3, random(4, 72, seed=3)
    weight = None if given == "neither" else random(72, dtype=dtype)
    bias = random(72, dtype=dtype, seed=1) if given == "weight and bias" else None

    want = norm.layer_norm(x, weight, bias, 1e-5, residual)
    got = layer_norm(x, weight, bias, 1e-5, residual.clone())

    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [70, *more(3000)])
def test_glu_and_activation_know_every_kind(kind: str, width: int) -> None:
    x = 3 * random(2, 2 * width)
    x[0, 0], x[0, 1] = 100.0, -100.0  # exponentials overflow here

    close(glu(x, kind), gating.glu(x, kind))
    close(activation(x, kind), gating.activation(x, kind))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_glu_takes_rows_that_lie_apart_in_half_precision(dtype: torch.dtype) -> None:
    x = random(3, 300, dtype=dtype)[:, :200]

    close(glu(x, "silu"), gating.glu(x, "silu"))


def test_clamped_glu_is_gpt_oss() -> None:
    x = 5 * random(2, 64)
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)

    found = glu(x, "silu", Clamping(2.0, "gpt_oss", 1.7))

    close(found, (up + 1) * gate * torch.sigmoid(gate * 1.7))


@pytest.mark.parametrize("form", ["gpt_oss", "inputs", "outputs"])
def test_glu_is_clamped_as_the_reference(form: ClampForm) -> None:
    x, clamping = 5 * random(2, 64), Clamping(2.0, form, 1.7)

    found, wanted = glu(x, "gelu", clamping), gating.glu(x, "gelu", clamping)

    close(found, wanted)
    assert not torch.equal(home(wanted), home(gating.glu(x, "gelu")))


@EACH_DTYPE
def test_rows_are_gathered_and_scaled(dtype: torch.dtype) -> None:
    table, ids = random(9, 130, dtype=dtype), ints([8, 0, 8, 3])

    close(take_rows(table, ids), rows.take_rows(table, ids))
    close(embedding(ids, table, 2.5), embed.embedding(ids, table, 2.5))


def test_a_quantised_table_takes_the_way_of_the_reference() -> None:
    table, ids = put(quantise_int8(home(random(9, 64)))), ints([1, 7]).long()

    assert torch.equal(embedding(ids, table, 1.0), embed.embedding(ids, table, 1.0))


@EACH_DTYPE
def test_arithmetic_on_rows_rounds_once(dtype: torch.dtype) -> None:
    a, b = random(3, 50, dtype=dtype), random(3, 50, dtype=dtype, seed=1)

    close(add(a, b, 0.3), rows.add(a, b, 0.3))
    close(scale(a, 7.0), rows.scale(a, 7.0))
    close(softcap(40 * a, 30.0), rows.softcap(40 * a, 30.0))
