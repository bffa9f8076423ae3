"""Native residual streams against the reference, and rows against themselves in other company."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.streams import StreamParts, StreamShape
from tests.support.native import DTYPES, assert_close, native, random, variants

DIM, ROWS = 48, 21


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@pytest.fixture(params=[1, 4, 8])
def count(request: pytest.FixtureRequest) -> int:
    return request.param


def parts(count: int, *, mixes: bool) -> StreamParts:
    outputs = count * (2 + count) if mixes else count
    shape = StreamShape(streams=count, rounds=7, eps=1e-6, norm_eps=1e-5)
    fn = random(outputs, count * DIM, dtype=torch.float32, seed=1, scale=0.1)
    base = random(outputs, dtype=torch.float32, seed=2)
    return StreamParts(fn, base, random(3 if mixes else 1, dtype=torch.float32, seed=3), shape)


def streams(count: int, rows: int = ROWS) -> torch.Tensor:
    return random(rows, count * DIM, dtype=torch.float32, seed=4, scale=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_to_all_streams(library: Library, count: int, dtype: torch.dtype) -> None:
    x = random(ROWS, DIM, dtype=torch.float32)

    got = native(library, dtype, lambda _, x: ops.spread_streams(x, count), [x])

    assert torch.equal(got, ops.spread_streams(x, count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_are_read_as_one_row(library: Library, count: int, dtype: torch.dtype) -> None:
    rows, mixing, last = streams(count), parts(count, mixes=True), parts(count, mixes=False)

    read = native(library, dtype, lambda _, x: ops.collapse_streams(x, mixing)[0], [rows])
    total = native(library, dtype, lambda _, x: ops.sum_streams(x, last), [rows])

    assert_close(read, ops.collapse_streams(rows, mixing)[0], torch.float32)
    assert_close(total, ops.sum_streams(rows, last), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_are_mixed_by_normalised_matrices(
    library: Library, count: int, dtype: torch.dtype
) -> None:
    rows, how = streams(count), parts(count, mixes=True)
    out = random(ROWS, DIM, dtype=dtype, seed=5)

    def mixed(_, x, y):
        return ops.expand_streams(x, y, ops.collapse_streams(x, how)[1])

    got = native(library, dtype, mixed, [rows, out])

    mix = ops.collapse_streams(rows, how)[1]
    assert_close(got, ops.expand_streams(rows, out, mix), torch.float32)
    matrix = mix[:, count:].unflatten(1, (count, count))
    assert torch.allclose(matrix.sum(1), torch.ones(ROWS, count), atol=1e-4)


def test_bits_do_not_depend_on_other_rows(library: Library) -> None:
    rows, how = streams(4, 30), parts(4, mixes=True)

    def both(_, x):
        row, mix = ops.collapse_streams(x, how)
        return ops.expand_streams(x, row, mix)

    whole = native(library, torch.float32, both, [rows])

    for start, stop in ((0, 1), (7, 9), (11, 30)):
        found = native(library, torch.float32, both, [rows[start:stop].contiguous()])
        assert torch.equal(found, whole[start:stop]), start


@pytest.mark.parametrize(("count", "columns"), [(9, 48), (4, 40)])
def test_streams_without_a_kernel_are_refused(library: Library, count: int, columns: int) -> None:
    x = random(3, columns, dtype=torch.float32)

    with pytest.raises(Unsupported, match=f"{count} residual streams of {columns} f32 columns"):
        native(library, torch.float32, lambda _, x: ops.spread_streams(x, count), [x])
