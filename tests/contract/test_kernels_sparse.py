"""Native attention to chosen tokens against the reference, and rows against themselves in company.

The numbers of the index are small integers, turned by quarters: scores are exact, and many of them
equal, so a choice is either right or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import (
    AttentionLayer,
    HeadNorm,
    IndexedRows,
    LatentParts,
    LatentShape,
    Rope,
    TracedTensor,
)
from sylvan.kernels.native import sparse
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.cache import PageShape, allocate_pages
from sylvan.kernels.sparse.reference import attend_slots, choose
from tests.support.native import DTYPES, MAX_ROWS, NativeOp, random, variants

PAGE, PAGES, ROPE_DIM, INDEX_COLUMNS = 32, 40, 16, 24
SHAPES = {
    "few heads": LatentShape(num_heads=3, nope=24, rope_dim=ROPE_DIM, value=40, latent=72),
    "two tiles of heads": LatentShape(
        num_heads=37, nope=32, rope_dim=ROPE_DIM, value=32, latent=64
    ),
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@dataclass(frozen=True)
class Case:
    """A layer, and by how many heads its index chooses how many tokens; 0 heads: it has none."""

    shape: LatentShape
    dtype: torch.dtype
    heads: int = 3
    top_k: int = 40
    interleaved: bool = False

    @property
    def layer(self) -> AttentionLayer:
        shape = self.shape
        return AttentionLayer(
            index=0,
            num_heads=shape.num_heads,
            num_kv_heads=1,
            head_dim=shape.latent + shape.rope_dim,
            v_head_dim=shape.latent,
            scale=0.15,
        )

    @property
    def parts(self) -> LatentParts:
        quarters = torch.arange(700)[:, None] * torch.arange(ROPE_DIM // 2) * (torch.pi / 2)
        table = torch.cat((quarters.cos(), quarters.sin()), 1).round()
        outputs = self.shape.num_heads * (self.shape.nope + self.shape.value)
        up = random(outputs, self.shape.latent, dtype=self.dtype, seed=4) * 0.2
        norm = HeadNorm(random(self.shape.latent, dtype=self.dtype, seed=5), 1e-6, offset=1.0)
        return LatentParts(self.shape, up, norm, Rope(table, interleaved=True))

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """Queries, latents, and heads, key and weights of the index."""
        shape = self.shape
        q = random(rows, shape.num_heads * (shape.nope + shape.rope_dim), dtype=self.dtype)
        kv = random(rows, shape.latent + shape.rope_dim, dtype=self.dtype, seed=1)
        generator = torch.Generator().manual_seed(2)
        sizes = self.heads * INDEX_COLUMNS, INDEX_COLUMNS, self.heads
        index = [torch.randint(-2, 3, (rows, n), generator=generator) for n in sizes]
        return [q, kv, index[0].to(self.dtype), index[1].to(self.dtype), index[2].float()]

    def expected(self, matrices: list[torch.Tensor]) -> torch.Tensor:
        positions, layer, latent = torch.arange(len(matrices[0])), self.layer, self.shape.latent
        q, k = ops.latent_heads(*matrices[:2], self.parts, positions)
        rope = Rope(self.parts.rope.cos_sin, self.interleaved)
        heads = matrices[2].float().unflatten(1, (self.heads, -1))
        heads = reference.rotate(heads, positions, rope)
        keys = reference.rotate(matrices[3].float()[:, None], positions, rope)[:, 0]
        first = min(self.top_k, len(q))
        out = reference.attend(q[:first], k[:first], k[:first, :, :latent], layer)
        out = out.unflatten(1, (self.shape.num_heads, -1))
        if len(q) > first:
            chosen = choose(heads[first:], matrices[4][first:], keys, first, self.top_k)
            rest = attend_slots(q[first:], k[None], chosen, layer, latent)
            out = torch.cat((out, rest))
        return ops.latent_output(out, self.parts)


class Cache:
    """Pages of two layers full of NaN, and one request; the second takes the first one's choice."""

    def __init__(self, library: Library, case: Case, *, shared: bool = False) -> None:
        layer, parts = case.layer, case.parts
        shape = PageShape(
            num_kv_heads=1,
            head_dim=layer.head_dim,
            value_dim=INDEX_COLUMNS,
            page_size=PAGE,
            dtype=case.dtype,
            tokens=True,
        )
        layers = allocate_pages(shape, PAGES, 2).layers
        for pages in layers:
            pages.keys[:] = pages.values[:] = 0xFF
        self.table = np.random.default_rng(0).permutation(PAGES - 1).astype(np.int32)[None] + 1

        def trace(_: object, *given: TracedTensor) -> TracedTensor:
            q, kv, heads, key, weights = given
            index = IndexedRows(
                q=heads, k=key, weights=weights, top_k=case.top_k, interleaved=case.interleaved
            )
            out, chosen = ops.sparse_latent_attention(q, kv, parts, layer, index)
            if shared:
                second = replace(layer, index=1)
                out, _ = ops.sparse_latent_attention(q, kv, parts, second, chosen)
            return out

        self.op = NativeOp(library, case.dtype, trace, case.inputs(1), dict(enumerate(layers)))

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 40, 41, 290])
def test_chosen_tokens_equal_the_reference(
    library: Library, name: str, rows: int, dtype: torch.dtype
) -> None:
    case = Case(SHAPES[name], dtype, interleaved=rows == 41)
    matrices = case.inputs(rows)

    want = case.expected(matrices)
    got = Cache(library, case).step(matrices, 0)

    far = 0.02 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        got.float(), want.float(), rtol=far, atol=float(want.abs().max()) * far
    )


def test_a_layer_takes_the_choice_of_another(library: Library) -> None:
    case = Case(SHAPES["few heads"], torch.float32)
    matrices = case.inputs(130)

    own = Cache(library, case).step(matrices, 0)
    taken = Cache(library, case, shared=True).step(matrices, 0)

    assert torch.equal(own, taken)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_chunks_nor_on_room_for_scores(
    library: Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "SCORES_MIB", 1)
    case = Case(SHAPES["few heads"], dtype, heads=11, top_k=150)
    rows = MAX_ROWS
    matrices = case.inputs(rows)
    whole = Cache(library, case).step(matrices, 0)  # more scores than there is room for
    assert rows * rows * 4 >= 1 << 20

    cache = Cache(library, case)
    ends = [200, 261, *range(262, 300), 400, rows]
    for start, stop in zip([0, *ends], ends, strict=False):
        found = cache.step([x[start:stop] for x in matrices], start)
        assert torch.equal(found, whole[start:stop]), start


def test_all_tokens_are_chosen_where_there_are_no_more(library: Library) -> None:
    """Then it is latent attention, whatever the index says."""
    few, many = (Case(SHAPES["few heads"], torch.float32, top_k=k) for k in (100, 600))
    matrices = few.inputs(100)

    assert torch.equal(
        Cache(library, few).step(matrices, 0), Cache(library, many).step(matrices, 0)
    )
