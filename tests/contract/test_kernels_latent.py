"""Native latent attention against the reference, and rows against themselves in other company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, HeadNorm, LatentParts, LatentShape, Rope
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.opset import FromStack, ToStack
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.cache import PageShape, allocate_pages
from tests.support.native import DTYPES, NativeOp, random, variants

SHAPES = {
    "any columns": LatentShape(num_heads=6, nope=24, rope_dim=16, value=40, latent=72),
    "whole tiles": LatentShape(num_heads=6, nope=32, rope_dim=16, value=64, latent=96),
}
PAGE, PAGES = 32, 40


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> LatentShape:
    return SHAPES[request.param]


def layer_of(shape: LatentShape) -> AttentionLayer:
    return AttentionLayer(
        index=0,
        num_heads=shape.num_heads,
        num_kv_heads=1,
        head_dim=shape.latent + shape.rope_dim,
        v_head_dim=shape.latent,
        scale=0.15,
    )


def parts(shape: LatentShape, dtype: torch.dtype, *, interleaved: bool = False) -> LatentParts:
    angles = torch.arange(700)[:, None] * 100.0 ** (-torch.arange(0, 16, 2) / 16)
    up = random(shape.num_heads * (shape.nope + shape.value), shape.latent, dtype=dtype, seed=4)
    return LatentParts(
        shape,
        up * 0.2,
        HeadNorm(random(shape.latent, dtype=dtype, seed=5), 1e-6, offset=1.0),
        Rope(torch.cat((angles.cos(), angles.sin()), 1), interleaved),
    )


def scaled(constants: LatentParts) -> LatentParts:
    """With factors of queries by position, as Mistral 4 has them."""
    return replace(constants, query_scales=1 + 0.1 * torch.log1p(torch.arange(700) // 20))


def inputs(shape: LatentShape, dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
    queries, dim = shape.num_heads * (shape.nope + shape.rope_dim), shape.latent + shape.rope_dim
    return [random(rows, queries, dtype=dtype), random(rows, dim, dtype=dtype, seed=1)]


class Cache:
    """Pages of one layer full of NaN, and one request."""

    def __init__(self, library: Library, constants: LatentParts, dtype: torch.dtype) -> None:
        layer = layer_of(constants.shape)
        shape = PageShape(
            num_kv_heads=1,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            page_size=PAGE,
            dtype=dtype,
            shared=True,
        )
        pages = allocate_pages(shape, PAGES).layers[0]
        pages.keys[:] = 0xFF
        self.table = np.random.default_rng(0).permutation(PAGES - 1).astype(np.int32)[None] + 1
        self.op = NativeOp(
            library,
            dtype,
            lambda _, q, kv: ops.latent_attention(q, kv, constants, layer),
            inputs(constants.shape, dtype, 1),
            {0: pages},
        )

    def step(self, matrices: list[torch.Tensor], start: int) -> torch.Tensor:
        """The next rows, from position `start` on."""
        count = len(matrices[0])
        at = np.arange(start, start + count)
        arrays = {
            "positions": at,
            "slots": self.table[0, at // PAGE] * PAGE + at % PAGE,
            "row_start": np.array([0, count]),
            "kv_len": np.array([start + count]),
            "table_row": np.zeros(1),
            "page_table": self.table,
        }
        arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        self.op.write(*matrices)
        return self.op.run(
            StepRun(tokens=count, seqs=1, table_stride=self.table.shape[1], **pointers)
        )


def expected(matrices: list[torch.Tensor], constants: LatentParts) -> torch.Tensor:
    q, k = ops.latent_heads(*matrices, constants, torch.arange(len(matrices[0])))
    shape = constants.shape
    out = reference.attend(q, k, k[..., : shape.latent], layer_of(shape))
    return ops.latent_output(out.unflatten(1, (shape.num_heads, -1)), constants)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 300])
def test_prompts_equal_the_reference(
    library: Library, shape: LatentShape, rows: int, interleaved: bool, dtype: torch.dtype
) -> None:
    constants = parts(shape, dtype, interleaved=interleaved)
    matrices = inputs(shape, dtype, rows)

    want = expected(matrices, constants)
    got = Cache(library, constants, dtype).step(matrices, 0)

    far = 0.02 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        got.float(), want.float(), rtol=far, atol=float(want.abs().max()) * far
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_scaled_by_position(
    library: Library, shape: LatentShape, dtype: torch.dtype
) -> None:
    constants, matrices = scaled(parts(shape, dtype)), inputs(shape, dtype, 130)

    want = expected(matrices, constants)
    got = Cache(library, constants, dtype).step(matrices, 0)

    far = 0.02 if dtype == torch.bfloat16 else 1e-4
    largest = float(want.abs().max())
    torch.testing.assert_close(got.float(), want.float(), rtol=far, atol=largest * far)
    plain = expected(matrices, parts(shape, dtype)).float()
    assert float((want.float() - plain).abs().max()) > 4 * far * largest


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_table_nothing_is_rotated(
    library: Library, shape: LatentShape, dtype: torch.dtype
) -> None:
    constants, matrices = replace(parts(shape, dtype), rope=None), inputs(shape, dtype, 40)

    want = expected(matrices, constants)
    got = Cache(library, constants, dtype).step(matrices, 0)

    far = 0.02 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        got.float(), want.float(), rtol=far, atol=float(want.abs().max()) * far
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_chunks(
    library: Library, shape: LatentShape, dtype: torch.dtype
) -> None:
    constants, matrices = scaled(parts(shape, dtype)), inputs(shape, dtype, 290)
    whole = Cache(library, constants, dtype).step(matrices, 0)

    cache = Cache(library, constants, dtype)
    ends = [200, 261, *range(262, 291)]
    for start, stop in zip([0, *ends], ends, strict=False):
        found = cache.step([x[start:stop] for x in matrices], start)
        assert torch.equal(found, whole[start:stop]), start


def test_heads_of_whole_tiles_are_multiplied_where_they_lie(library: Library) -> None:
    kinds = {
        name: {
            type(op)
            for op in Cache(library, parts(shape, torch.float32), torch.float32).op.program.ops
        }
        for name, shape in SHAPES.items()
    }

    assert ToStack in kinds["any columns"]
    assert not {ToStack, FromStack} & kinds["whole tiles"]
