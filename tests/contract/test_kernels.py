"""Every compiled variant of every op against its PyTorch reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import ClampForm, Clamping, LinearWeight
from sylvan.kernels.matmul.codes import Code, packed_bits_of, paired
from sylvan.kernels.matmul.weights import CodedWeight, Int8Weight, quantise_int4, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from tests.support.coded import KINDS, STEPPED, coded, stepped
from tests.support.native import DTYPES, NativeOp, assert_close, native, random, variants

ROWS = [1, 7, 70]


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (896, 64), (100, 72), (33, 7)])
def test_dense_linear_equals_reference(
    library: Library, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x = random(rows, inputs, dtype=dtype)
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    want = ops.linear(x.float(), weight.float(), bias.float())

    got = native(library, dtype, lambda r, v: ops.linear(v, weight.clone(), bias), [x])
    exact = native(
        library, dtype, lambda r, v: ops.linear(v, weight.clone(), bias, out_f32=True), [x]
    )

    assert_close(got, want.to(dtype), dtype)
    torch.testing.assert_close(exact, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (896, 64), (100, 72)])
def test_int8_linear_equals_reference(
    library: Library, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x = random(rows, inputs, dtype=dtype)
    weight = quantise_int8(random(outputs, inputs, dtype=torch.float32, seed=1))
    bias = random(outputs, dtype=dtype, seed=2)
    want = ops.linear(x, weight, bias, out_f32=True)

    got = native(library, dtype, lambda r, v: ops.linear(v, weight, bias, out_f32=True), [x])

    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)


def test_int8_linear_takes_the_lowest_level(library: Library) -> None:
    x = random(3, 64, dtype=torch.float32)
    weight = Int8Weight(torch.full((32, 64), -128, dtype=torch.int8), torch.ones(32))
    want = ops.linear(x, weight)

    got = native(library, torch.float32, lambda r, v: ops.linear(v, weight), [x])

    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "group"), [(128, 32), (96, 32), (192, 64), (896, 128)])
def test_int4_linear_equals_reference(
    library: Library, dtype: torch.dtype, rows: int, inputs: int, group: int
) -> None:
    x = random(rows, inputs, dtype=dtype)
    weight = quantise_int4(random(72, inputs, dtype=torch.float32, seed=1), group)
    want = ops.linear(x, weight, out_f32=True)

    got = native(library, dtype, lambda r, v: ops.linear(v, weight, out_f32=True), [x])

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


LINEARS: dict[str, tuple[int, Callable[[torch.Tensor], LinearWeight]]] = {
    "dense": (1000, lambda w: w),
    "int8": (1000, quantise_int8),
    "int4, groups of 32": (672, lambda w: quantise_int4(w, 32)),
    "int4, groups of 64": (1088, lambda w: quantise_int4(w, 64)),
    "int4, groups of 128": (640, lambda w: quantise_int4(w, 128)),
    **{f"codes: {kind}": (640, lambda w, kind=kind: coded(kind, *w.shape)) for kind in KINDS},
    **{f"codes: {kind}": (768, lambda w, kind=kind: stepped(kind, *w.shape)) for kind in STEPPED},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_coded_linear_equals_reference(
    library: Library, dtype: torch.dtype, rows: int, kind: str
) -> None:
    x = random(rows, 384, dtype=dtype)
    weight, bias = coded(kind, 72, 384), random(72, dtype=dtype, seed=2)
    want = x.double() @ weight.numbers().double().T + bias.double()

    got = native(library, dtype, lambda r, v: ops.linear(v, weight, bias, out_f32=True), [x])

    assert want.shape == got.shape
    size = float(want.abs().max())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=size * 2e-6)
    assert torch.allclose(
        ops.linear(x, weight, bias, out_f32=True).double(), want, atol=size * 1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", STEPPED)
def test_steps_of_scales_change_no_bit(
    library: Library, dtype: torch.dtype, rows: int, kind: str
) -> None:
    x, weight = random(rows, 768, dtype=dtype), stepped(kind, 72, 768)
    want = x.double() @ weight.numbers().double().T

    got, same = (
        native(library, dtype, lambda r, v, w=w: ops.linear(v, w, out_f32=True), [x])
        for w in (weight, weight.for_devices())
    )

    assert torch.equal(got, same)
    size = float(want.abs().max())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=size * 2e-6)


@pytest.mark.parametrize("code", get_args(Code))
def test_every_code_stands_for_its_number(library: Library, code: Code) -> None:
    bits = packed_bits_of(code)
    levels = torch.arange(1 << bits, dtype=torch.uint8).repeat(32, 256 >> bits)
    if code == "fp8_e4m3":
        levels[(levels & 127) == 127] = 0  # no numbers
    for zeros in (False, True) if code in ("int4", "int8") else (False,):
        q = paired(levels) if bits == 4 else levels
        zero = torch.arange(32)[:, None].clamp(max=1 << bits).to(torch.uint8) if zeros else None
        zero = zero.clamp(max=16) if zero is not None and bits == 4 else zero
        weight = CodedWeight(q, torch.ones(32, 1), code, 0, zero)

        got = native(
            library, torch.float32, lambda r, v, w=weight: ops.linear(v, w), [torch.eye(256)]
        )

        assert torch.equal(got, weight.numbers().T), zeros


def test_inputs_in_another_order_are_put_in_it(library: Library) -> None:
    x = random(9, 96, dtype=torch.bfloat16)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)).int()
    weight = replace(coded("int4", 40, 96, group=32), order=order)
    want = x.double() @ weight.numbers().double().T

    got = native(library, torch.bfloat16, lambda r, v: ops.linear(v, weight, out_f32=True), [x])

    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("inputs", "group"),
    [(100, 0), (33 * 2, 0), (160, 0), (192, 64), (192, 128), (1024, 512), (48, 16)],
)
def test_codes_of_other_sizes(library: Library, inputs: int, group: int) -> None:
    x = random(11, inputs, dtype=torch.float32)
    weight = coded("int8", 50, inputs, group=group)
    want = x.double() @ weight.numbers().double().T

    got = native(library, torch.float32, lambda r, v: ops.linear(v, weight), [x])

    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_times_a_weight_has_the_same_bits_in_any_company(
    library: Library, dtype: torch.dtype, kind: str
) -> None:
    inputs, convert = LINEARS[kind]
    x = random(300, inputs, dtype=dtype)
    weight = convert(random(72, inputs, dtype=dtype, seed=1))
    op = NativeOp(library, dtype, lambda r, v: ops.linear(v, weight, out_f32=True), [x])
    op.write(x)
    whole = op.run(StepRun(tokens=300))

    for rows in (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 65, 129, 257):
        op.write(x[-rows:])
        assert torch.equal(op.run(StepRun(tokens=rows)), whole[-rows:]), rows


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "int8", "int4, groups of 64", "codes: int4 g128 zeros"])
def test_tiles_of_wide_layers_change_no_bit(library: Library, kind: str, threads: int) -> None:
    x = random(40, 128, dtype=torch.bfloat16)
    weight = LINEARS[kind][1](random(8232, 128, dtype=torch.bfloat16, seed=1))
    library.dll.sylvan_threads(threads)
    op = NativeOp(library, torch.bfloat16, lambda r, v: ops.linear(v, weight), [x])
    op.write(x)
    whole = op.run(StepRun(tokens=40))

    for rows in (1, 3, 8, 16, 32):
        op.write(x[-rows:])
        assert torch.equal(op.run(StepRun(tokens=rows)), whole[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, *STEPPED])
def test_embedding_reads_rows_of_codes(library: Library, dtype: torch.dtype, kind: str) -> None:
    weight = stepped(kind, 70, 512) if kind in STEPPED else coded(kind, 70, 384)
    ids = np.array([0, 69, 17, 17, 31], np.int32)
    want = ops.embedding(torch.from_numpy(ids), weight, 1.5)

    got = native(
        library,
        dtype,
        lambda r: ops.embedding(r.input_ids, weight, 1.5),
        [],
        StepRun(tokens=5, ids=ids.ctypes.data),
    )

    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
def test_embedding_reads_rows_of_the_packed_head(
    library: Library, dtype: torch.dtype, kind: str
) -> None:
    table = random(70, 128, dtype=dtype)
    weight = {"dense": table, "int8": quantise_int8(table), "int4": quantise_int4(table, 64)}[kind]
    ids = np.array([0, 69, 17, 17, 31], np.int32)
    want = ops.embedding(torch.from_numpy(ids), weight, 1.5)
    packed = weight.clone() if isinstance(weight, torch.Tensor) else weight

    got = native(
        library,
        dtype,
        lambda r: ops.embedding(r.input_ids, packed, 1.5),
        [],
        StepRun(tokens=5, ids=ids.ctypes.data),
    )

    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("source", ["positions", "types"])
def test_embedding_of_positions_and_token_types(library: Library, source: str) -> None:
    table = random(3, 40, dtype=torch.float32)
    ids = np.array([2, 0, 5, 1], np.int32)  # one is beyond the table
    want = ops.embedding(torch.from_numpy(ids).clamp(max=2), table)
    name = {"positions": "positions", "types": "token_types"}[source]

    got = native(
        library,
        torch.float32,
        lambda r: ops.embedding(getattr(r, name), table.clone()),
        [],
        StepRun(tokens=4, **{source: ids.ctypes.data}),
    )

    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_residual_may_be_of_the_rows_own_type(
    library: Library, dtype: torch.dtype, norm: str
) -> None:
    x, residual = random(5, 72, dtype=dtype), random(5, 72, dtype=dtype, seed=1)
    weight, bias = random(72, dtype=dtype, seed=2), random(72, dtype=dtype, seed=3)

    def both(a, b):
        if norm == "rms":
            return ops.rms_norm(a, weight, 1e-6, b)
        return ops.layer_norm(a, weight, bias, 1e-12, b)

    for index in range(2):
        want = both(x, residual.clone())[index]
        got = native(library, dtype, lambda r, a, b, i=index: both(a, b)[i], [x, residual])
        assert_close(got, want, dtype if index == 0 else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [24, 64, 896])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_adds_and_normalises(
    library: Library, dtype: torch.dtype, cols: int, offset: float
) -> None:
    x = random(5, cols, dtype=dtype)
    residual = random(5, cols, dtype=torch.float32, seed=1)
    weight = random(cols, dtype=dtype, seed=2)

    for index in range(2):
        want = ops.rms_norm(x, weight, 1e-6, residual, weight_offset=offset)[index]
        got = native(
            library,
            dtype,
            lambda r, a, b, i=index: ops.rms_norm(a, weight, 1e-6, b, weight_offset=offset)[i],
            [x, residual],
        )
        assert_close(got, want, dtype if index == 0 else torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", ["rows", "stream"])
def test_rms_norm_without_residual_normalises(
    library: Library, dtype: torch.dtype, first: str
) -> None:
    x = random(5, 40, dtype=dtype if first == "rows" else torch.float32)
    weight = random(40, dtype=dtype, seed=2)
    want = ops.rms_norm(x, weight, 1e-5)[0]

    got = native(library, dtype, lambda r, v: ops.rms_norm(v, weight, 1e-5)[0], [x])

    assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [24, 256])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_equals_reference(
    library: Library, dtype: torch.dtype, cols: int, affine: bool
) -> None:
    x, residual = random(5, cols, dtype=dtype), random(5, cols, dtype=torch.float32, seed=1)
    weight = random(cols, dtype=dtype, seed=2) if affine else None
    bias = random(cols, dtype=dtype, seed=3) if affine else None
    want = ops.layer_norm(x, weight, bias, 1e-5, residual)[0]

    got = native(
        library,
        dtype,
        lambda r, a, b: ops.layer_norm(a, weight, bias, 1e-5, b)[0],
        [x, residual],
    )

    assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu"]
)
def test_non_linearities_equal_reference(library: Library, dtype: torch.dtype, kind: str) -> None:
    x = torch.cat([random(4, 200, dtype=dtype), random(4, 200, dtype=dtype, scale=0.01)])
    x[0, :3] = torch.tensor([80.0, -80.0, 0.0])

    gated = native(library, dtype, lambda r, v: ops.glu(v, kind), [x])
    plain = native(library, dtype, lambda r, v: ops.activation(v, kind), [x])

    assert_close(gated, ops.glu(x, kind), dtype)
    assert_close(plain, ops.activation(x, kind), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [1.5, float("inf")])
@pytest.mark.parametrize("form", ["gpt_oss", "inputs", "outputs"])
def test_clamped_glu_equals_reference(
    library: Library, dtype: torch.dtype, form: ClampForm, limit: float
) -> None:
    x, clamping = random(9, 144, dtype=dtype, scale=4.0), Clamping(limit, form, 1.7)

    got = native(library, dtype, lambda r, v: ops.glu(v, "silu", clamping), [x])

    assert_close(got, ops.glu(x, "silu", clamping), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alphas", [(0.8, 0.8), (-30.0, 30.0)])
def test_xielu_equals_reference(
    library: Library, dtype: torch.dtype, alphas: tuple[float, float]
) -> None:
    alpha_p, alpha_n = (torch.tensor([alpha]) for alpha in alphas)
    numbers = alpha_p, alpha_n, torch.tensor([0.5]), torch.tensor([-1e-6])
    x = random(9, 72, dtype=dtype, scale=4.0)
    x[0] = -torch.logspace(-8, 2, 72).to(dtype)  # where differences would cancel
    x[1, :3] = torch.tensor([0.0, -0.0, -5e-7])

    got = native(library, dtype, lambda r, v: ops.xielu(v, *numbers), [x])

    assert_close(got, ops.xielu(x, *numbers), dtype)


def test_xielu_loses_no_digits_near_zero(library: Library) -> None:
    numbers = torch.tensor([[0.8], [0.8], [0.5], [-1e-6]])
    x = -torch.logspace(-8, -1, 72)[None]

    got = native(library, torch.float32, lambda r, v: ops.xielu(v, *numbers), [x])

    want = ops.xielu(x.double(), *numbers)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_arithmetic_equals_reference(library: Library, dtype: torch.dtype) -> None:
    a, b = random(4, 50, dtype=torch.float32), random(4, 50, dtype=dtype, seed=1)

    assert_close(
        native(library, dtype, lambda r, x, y: ops.add(x, y, 0.5), [a, b]),
        ops.add(a, b, 0.5),
        torch.float32,
    )
    assert_close(
        native(library, dtype, lambda r, x: ops.scale(x, 3.0), [b]), ops.scale(b, 3.0), dtype
    )
    assert_close(
        native(library, dtype, lambda r, x: ops.softcap(x, 0.7), [a]),
        ops.softcap(a, 0.7),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamp_keeps_what_lies_within(library: Library, dtype: torch.dtype) -> None:
    x = random(5, 50, dtype=dtype)

    found = native(library, dtype, lambda _, v: ops.clamp(v, 0.75), [x])

    assert torch.equal(found, x.clamp(-0.75, 0.75))
    assert torch.equal(ops.clamp(x, 0.75), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_rounds_once(library: Library, dtype: torch.dtype) -> None:
    x = random(4, 50, dtype=torch.float32)
    like = torch.empty(0, dtype=dtype)

    assert torch.equal(native(library, dtype, lambda _, v: ops.cast(v, like), [x]), x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_rows_picks_the_sample_rows(library: Library, dtype: torch.dtype) -> None:
    x = random(9, 50, dtype=dtype)
    rows = np.array([8, 0, 3], np.int32)
    step = StepRun(tokens=9, outputs=3, out_rows=rows.ctypes.data)

    got = native(library, dtype, lambda r, v: ops.take_rows(v, r.sample_rows), [x], step)

    assert torch.equal(got, x[[8, 0, 3]])
