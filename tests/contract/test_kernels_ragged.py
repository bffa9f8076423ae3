"""Native attention of texts over themselves against the reference, both ways."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.paged import reference
from tests.support.native import DTYPES, NativeOp, assert_close, random, variants

BASE = AttentionLayer(index=0, num_heads=4, num_kv_heads=4, head_dim=32, scale=0.2, causal=False)
LAYERS = {
    "all": BASE,
    "grouped": replace(BASE, num_heads=6, num_kv_heads=2, head_dim=64),
    "heads of 24": replace(BASE, head_dim=24),
    "heads of 128": replace(BASE, num_heads=2, num_kv_heads=1, head_dim=128),
    "window": replace(BASE, window=37),
    "window of one": replace(BASE, window=1),
    "window over chunks": replace(BASE, window=300),
}
LENGTHS = 13, 390, 64, 1


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


def rope_of(layer: AttentionLayer) -> Rope:
    inverse = 100.0 ** (-torch.arange(0, layer.head_dim, 2) / layer.head_dim)
    angles = torch.arange(512)[:, None] * inverse
    return Rope(torch.cat((angles.cos(), angles.sin()), 1))


def norm_of(layer: AttentionLayer) -> HeadNorm:
    return HeadNorm(random(layer.head_dim, dtype=torch.bfloat16, seed=7), 1e-6)


def texts_of(layer: AttentionLayer, dtype: torch.dtype) -> list[torch.Tensor]:
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return [random(n, width, dtype=dtype, seed=n) for n in LENGTHS]


class Texts:
    """One layer that attends over the texts of each step."""

    def __init__(self, library: Library, layer: AttentionLayer, dtype: torch.dtype) -> None:
        rope, norm = rope_of(layer), norm_of(layer)
        like = texts_of(layer, dtype)[:1]
        self.op = NativeOp(
            library, dtype, lambda _, qkv: ops.attention(qkv, layer, rope, norm, norm), like
        )

    def step(self, texts: list[torch.Tensor]) -> list[torch.Tensor]:
        lens = [len(text) for text in texts]
        arrays = {
            "positions": np.concatenate([np.arange(n) for n in lens]),
            "row_start": np.cumsum([0, *lens]),
            "kv_len": np.array(lens),
        }
        arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        self.op.write(torch.cat(texts))
        out = self.op.run(StepRun(tokens=sum(lens), seqs=len(lens), **pointers))
        return list(out.split(lens))


def expected(layer: AttentionLayer, texts: list[torch.Tensor]) -> torch.Tensor:
    rope, norm = rope_of(layer), norm_of(layer)
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    heads = reference.split_heads(torch.cat(texts), layer, positions, rope, (norm, norm))
    starts = [0, *itertools.accumulate(len(text) for text in texts)]
    q, k, v = (x.float() for x in heads)
    return ops.ragged_attention(q, k, v, starts, layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_texts_equal_reference(library: Library, dtype: torch.dtype, name: str) -> None:
    layer = LAYERS[name]
    texts = texts_of(layer, dtype)
    library.dll.sylvan_threads(2)

    got = Texts(library, layer, dtype).step(texts)

    assert_close(torch.cat(got), expected(layer, texts).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["all", "grouped", "window", "window over chunks"])
def test_bits_do_not_depend_on_company(library: Library, dtype: torch.dtype, name: str) -> None:
    layer = LAYERS[name]
    texts = texts_of(layer, dtype)
    library.dll.sylvan_threads(1)
    alone = [Texts(library, layer, dtype).step([text])[0] for text in texts]

    for threads in (1, 2, 5):
        library.dll.sylvan_threads(threads)
        kept = Texts(library, layer, dtype)
        for order in ([0, 1, 2, 3], [3, 1], [2, 3, 0], [1]):
            together = kept.step([texts[i] for i in order])
            for i, mine in zip(order, together, strict=True):
                assert torch.equal(mine, alone[i]), (threads, order, i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["all", "window"])
def test_a_text_that_is_no_number_leaves_nothing_behind(
    library: Library, dtype: torch.dtype, name: str
) -> None:
    layer = LAYERS[name]
    texts = texts_of(layer, dtype)
    bad = torch.full_like(texts[1], float("nan"))
    library.dll.sylvan_threads(2)
    clean = Texts(library, layer, dtype).step(texts[2:])

    used = Texts(library, layer, dtype)
    used.step([bad])
    beside = used.step([bad[:40], *texts[2:]])[1:]

    assert all(torch.equal(*pair) for pair in zip(beside, clean, strict=True))
