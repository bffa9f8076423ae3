"""Ops that quantise the rows they make give the bits of an op and a pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, TracedTensor
from sylvan.kernels.matmul.weights import quantise_int4, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.opset import Quantise
from tests.support.native import DTYPES, NativeOp, native, random, variants

ROWS, COLS = 9, 96
NORM = random(COLS, dtype=torch.float32, seed=3)
MAKERS: dict[str, Callable[[TracedTensor], TracedTensor]] = {
    "rms norm": lambda x: ops.rms_norm(x, NORM, 1e-6)[0],
    "layer norm": lambda x: ops.layer_norm(x, NORM, NORM, 1e-6)[0],
    "gate": lambda x: ops.glu(x, "silu"),
    "activation": lambda x: ops.activation(x, "gelu"),
    "xielu": lambda x: ops.xielu(x, *torch.tensor([[0.3], [-0.4], [0.5], [-1e-6]])),
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_rows_are_quantised_where_they_are_made(
    library: Library, name: str, bits: int, dtype: torch.dtype
) -> None:
    x = random(ROWS, COLS * (2 if name == "gate" else 1), dtype=dtype)
    dense = random(64, COLS, dtype=torch.float32, seed=1)
    weight: LinearWeight = quantise_int8(dense) if bits == 8 else quantise_int4(dense, 32)
    made = native(library, dtype, lambda r, v: MAKERS[name](v), [x])
    want = native(library, dtype, lambda r, v: ops.linear(v, weight), [made])

    op = NativeOp(library, dtype, lambda r, v: ops.linear(MAKERS[name](v), weight), [x])
    op.write(x)

    assert torch.equal(op.run(StepRun(tokens=ROWS)), want)
    assert not any(isinstance(one, Quantise) for one in op.program.ops)


def test_rows_of_two_formats_are_quantised_twice(library: Library) -> None:
    x = random(ROWS, COLS, dtype=torch.float32)
    dense = random(64, COLS, dtype=torch.float32, seed=1)
    eight, four = quantise_int8(dense), quantise_int4(dense, 32)

    def both(_: object, v: TracedTensor) -> TracedTensor:
        h = ops.rms_norm(v, NORM, 1e-6)[0]
        return ops.add(ops.linear(h, eight), ops.linear(h, four))

    h = native(library, torch.float32, lambda r, v: ops.rms_norm(v, NORM, 1e-6)[0], [x])
    parts = [
        native(library, torch.float32, lambda r, v, w=w: ops.linear(v, w), [h])
        for w in (eight, four)
    ]

    assert torch.equal(native(library, torch.float32, both, [x]), ops.add(*parts))
