"""Native paged attention against the reference, over pages that hold stale NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import (
    AttentionLayer,
    AttentionVariant,
    BlockPattern,
    HeadNorm,
    KVScales,
    Rope,
)
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.cache import PageShape, SmallNumbers, allocate_pages
from tests.support.native import DTYPES, NativeOp, assert_close, random, variants

NUM_PAGES = 60
BASE = AttentionLayer(index=0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
FLOATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
GIVEN = KVScales(torch.tensor([0.007, 0.002]), torch.tensor([0.005, 0.011]))  # some saturate


@dataclass(frozen=True)
class Case:
    """A layer, its rotary table and head norms."""

    layer: AttentionLayer = BASE
    rotary_dim: int = 0
    interleaved: bool = False
    qk_norm: bool = False
    norm_heads: tuple[int, int] = (1, 1)
    page_size: int = 32
    small: SmallNumbers | None = None
    variant: AttentionVariant | None = None

    def rope(self) -> Rope | None:
        if not self.rotary_dim:
            return None
        inverse = 100.0 ** (-torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angles = torch.arange(700)[:, None] * inverse
        return Rope(torch.cat((angles.cos(), angles.sin()), 1), self.interleaved)

    def norms(self) -> tuple[HeadNorm | None, HeadNorm | None]:
        if not self.qk_norm:
            return None, None
        dim = self.layer.head_dim
        sizes = zip(self.norm_heads, (7, 8), strict=True)
        q, k = (random(n * dim, dtype=torch.bfloat16, seed=seed) for n, seed in sizes)
        return HeadNorm(q, 1e-6), HeadNorm(k, 1e-5, offset=1.0)


BIASES = random(4 * 130, dtype=torch.float32, seed=12)
"""Of four heads: 130 distances each, or 3 by their beginning."""
CASES = {
    "grouped": Case(),
    "one head": Case(replace(BASE, num_heads=2)),
    "many heads a group": Case(replace(BASE, num_heads=14)),
    "rope": Case(rotary_dim=64),
    "partial rope": Case(rotary_dim=24),
    "interleaved rope": Case(rotary_dim=32, interleaved=True),
    "head norms": Case(rotary_dim=64, qk_norm=True),
    "norms over all heads": Case(rotary_dim=64, qk_norm=True, norm_heads=(4, 2)),
    "window": Case(replace(BASE, window=37)),
    "window over chunks": Case(replace(BASE, window=300)),
    "soft cap": Case(replace(BASE, softcap=1.5, scale=1.0)),
    "sinks": Case(replace(BASE, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "chunks": Case(rotary_dim=64, variant=AttentionVariant(chunk=100)),
    "chunks of pages": Case(page_size=16, variant=AttentionVariant(chunk=256)),
    "blocks": Case(
        replace(BASE, num_heads=8, blocks=BlockPattern(size=16, near=2, stride=8, step=1)),
        rotary_dim=64,
    ),
    "blocks over chunks": Case(
        replace(BASE, blocks=BlockPattern(size=300, near=1, stride=3, step=1, first_head=2))
    ),
    "blocks of few tokens": Case(
        replace(BASE, blocks=BlockPattern(size=5, near=3, stride=4, step=2)), small="int8"
    ),
    "chunks and a window": Case(replace(BASE, window=37), variant=AttentionVariant(chunk=100)),
    "slopes": Case(variant=AttentionVariant(slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]))),
    "biases": Case(variant=AttentionVariant(biases=BIASES)),
    "int8, biases": Case(small="int8", variant=AttentionVariant(biases=BIASES[: 4 * 3])),
    "int8, slopes": Case(
        small="int8", variant=AttentionVariant(slopes=torch.tensor([0.5, 0.25, 0.0, 0.0625]))
    ),
    "scaled queries": Case(
        rotary_dim=64, variant=AttentionVariant(query_scales=1 + torch.arange(700) / 300)
    ),
    "norms last": Case(rotary_dim=64, qk_norm=True, variant=AttentionVariant(norm_last=True)),
    "values narrower": Case(replace(BASE, v_head_dim=48)),
    **{
        f"heads of {dim}": Case(replace(BASE, head_dim=dim, scale=dim**-0.5), rotary_dim=dim // 2)
        for dim in (16, 24, 32, 80, 96, 128, 256)
    },
    **{f"pages of {size}": Case(page_size=size) for size in (16, 48, 64, 128)},
    "int8": Case(small="int8"),
    "int8, pages of 16": Case(
        replace(BASE, head_dim=80), rotary_dim=80, page_size=16, small="int8"
    ),
    "int8, window": Case(replace(BASE, window=37, softcap=5.0), page_size=48, small="int8"),
    "int4": Case(small="int4", rotary_dim=64),
    "int4, pages of 16": Case(
        replace(BASE, head_dim=128, scale=128**-0.5, v_head_dim=32), page_size=16, small="int4"
    ),
    "int4, window and sinks": Case(
        replace(BASE, window=37, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        page_size=48,
        small="int4",
    ),
    "int4, many heads a group": Case(
        replace(BASE, head_dim=256, scale=256**-0.5, num_heads=14), small="int4"
    ),
    "int8, wide": Case(replace(BASE, head_dim=256, v_head_dim=48, num_heads=6), small="int8"),
    "fp8_e4m3": Case(small="fp8_e4m3", rotary_dim=64),
    "fp8_e4m3, given scales": Case(replace(BASE, kv_scales=GIVEN), small="fp8_e4m3"),
    "fp8_e4m3, pages of 16": Case(
        replace(BASE, head_dim=80, window=37), rotary_dim=80, page_size=16, small="fp8_e4m3"
    ),
    "fp8_e5m2": Case(small="fp8_e5m2", rotary_dim=64),
    "fp8_e5m2, wide": Case(
        replace(BASE, head_dim=256, v_head_dim=48, num_heads=6), small="fp8_e5m2"
    ),
}

IN_COMPANY = (
    "many heads a group",
    "window over chunks",
    "heads of 80",
    "pages of 16",
    "sinks",
    "int8",
    "int4",
    "fp8_e4m3, given scales",
    "fp8_e5m2",
    "chunks",
    "slopes",
    "blocks",
    "blocks over chunks",
    "biases",
)


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


class Cache:
    """Pages of one layer, and three requests that keep growing."""

    def __init__(self, library: Library, case: Case, dtype: torch.dtype, page_seed: int = 0):
        self.library, self.case, self.dtype = library, case, dtype
        layer = case.layer
        shape = PageShape(
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            page_size=case.page_size,
            dtype=dtype,
            small=case.small,
        )
        self.pages = allocate_pages(shape, NUM_PAGES * 128 // case.page_size // 2).layers[0]
        self.pages.keys[:] = self.pages.values[:] = 0xFF  # NaN in both dtypes, and as a scale
        order = np.random.default_rng(page_seed).permutation(len(self.pages.keys) - 1) + 1
        self.table = order[: len(order) // 3 * 3].reshape(3, -1).astype(np.int32)
        like = rows_of(case, dtype, 1, 0)
        self.op = NativeOp(
            library,
            dtype,
            lambda _, qkv: ops.attention(qkv, case.layer, case.rope(), *case.norms(), case.variant),
            [like],
            {0: self.pages},
        )

    def step(self, qkv: dict[int, torch.Tensor], starts: dict[int, int]) -> torch.Tensor:
        """Rows of some requests, beginning at their positions."""
        size, slots, positions, lens = self.case.page_size, [], [], []
        for r, rows in qkv.items():
            at = np.arange(starts[r], starts[r] + len(rows))
            positions.append(at)
            slots.append(self.table[r, at // size] * size + at % size)
            lens.append(len(rows))
        arrays = {
            "positions": np.concatenate(positions),
            "slots": np.concatenate(slots),
            "row_start": np.cumsum([0, *lens]),
            "kv_len": np.array([starts[r] + n for r, n in zip(qkv, lens, strict=True)]),
            "table_row": np.array(list(qkv)),
            "page_table": self.table,
        }
        arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        step = StepRun(
            tokens=sum(lens), seqs=len(lens), table_stride=self.table.shape[1], **pointers
        )
        self.op.write(torch.cat(list(qkv.values())))
        return self.op.run(step)


def rows_of(case: Case, dtype: torch.dtype, tokens: int, seed: int) -> torch.Tensor:
    layer = case.layer
    width = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    return random(tokens, width + layer.num_kv_heads * layer.value_dim, dtype=dtype, seed=seed)


def expected(case: Case, qkv: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(qkv))
    variant = case.variant or AttentionVariant()
    before, norms = (None, None) if variant.norm_last else case.norms(), case.norms()
    q, k, v = reference.split_heads(qkv, case.layer, positions, case.rope(), before)
    if variant.norm_last:
        q, k = (
            reference.head_norm(x.float(), norm).to(qkv.dtype)
            for x, norm in zip((q, k), norms, strict=True)
        )
    if variant.query_scales is not None:
        q = (q.float() * variant.query_scales[positions, None, None]).to(qkv.dtype)
    if case.small == "int8":
        k, v = reference.through_int8(k), reference.through_int8(v)
    elif case.small == "int4":
        k, v = reference.through_int4(k), reference.through_int4(v)
    elif case.small:
        given, kind = case.layer.kv_scales, FLOATS[case.small]
        k = reference.through_fp8(k, kind, given and given.keys)
        v = reference.through_fp8(v, kind, given and given.values)
    size = variant.chunk or len(qkv)
    parts = [slice(start, start + size) for start in range(0, len(qkv), size)]
    layer = replace(case.layer, slopes=variant.slopes, biases=variant.biases)
    return torch.cat([reference.attend(q[p], k[p], v[p], layer) for p in parts])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_prompts_equal_reference(library: Library, dtype: torch.dtype, name: str) -> None:
    case = CASES[name]
    library.dll.sylvan_threads(2)
    prompts = {r: rows_of(case, dtype, n, r) for r, n in ((0, 13), (2, 390))}

    got = Cache(library, case, dtype).step(prompts, {0: 0, 2: 0})

    want = torch.cat([expected(case, qkv) for qkv in prompts.values()])
    assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_COMPANY)
def test_bits_do_not_depend_on_company(library: Library, dtype: torch.dtype, name: str) -> None:
    case = CASES[name]
    lens = {0: 401, 1: 77, 2: 5}
    qkv = {r: rows_of(case, dtype, n, r) for r, n in lens.items()}
    library.dll.sylvan_threads(1)
    whole = {}
    for r in lens:
        whole[r] = Cache(library, case, dtype).step({r: qkv[r]}, {r: 0})

    for threads, first, chunk in ((1, 300, 16), (2, 128, 64), (5, 400, 1)):
        library.dll.sylvan_threads(threads)
        cache = Cache(library, case, dtype, page_seed=threads)
        done = dict.fromkeys(lens, 0)
        parts: dict[int, list[torch.Tensor]] = {r: [] for r in lens}
        while any(done[r] < lens[r] for r in lens):
            todo = {r: (first if not done[r] else chunk) for r in lens if done[r] < lens[r]}
            work = {r: qkv[r][done[r] : done[r] + n] for r, n in todo.items()}
            out = cache.step(work, done)
            for r, part in zip(work, out.split([len(x) for x in work.values()]), strict=True):
                parts[r].append(part)
                done[r] += len(part)
        for r in lens:
            assert torch.equal(torch.cat(parts[r]), whole[r]), (threads, r)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_bits_do_not_depend_on_the_page_size(
    library: Library, dtype: torch.dtype, window: int | None
) -> None:
    library.dll.sylvan_threads(2)
    case = Case(replace(BASE, window=window))
    prompt = rows_of(case, dtype, 333, 0)
    want = Cache(library, case, dtype).step({0: prompt}, {0: 0})

    for size in (16, 64, 128):
        cache = Cache(library, replace(case, page_size=size), dtype)
        assert torch.equal(cache.step({0: prompt}, {0: 0}), want), size


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e4m3, given scales"])
def test_a_head_that_is_no_number_is_none_in_levels_either(library: Library, name: str) -> None:
    case = CASES[name]
    rows = rows_of(case, torch.float32, 20, 0)
    rows[7, -1] = float("nan")  # of the last value head

    got = Cache(library, case, torch.float32).step({0: rows}, {0: 0})

    half = got.shape[1] // 2
    assert got[:7].isfinite().all()
    assert got[:, :half].isfinite().all()
    assert got[7:, half:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "kind"),
    [
        *((16, None), (48, None), (64, None), (16, "int8"), (48, "int8"), (64, "int8")),
        *((48, "int4"), (48, "fp8_e5m2")),
    ],
)
def test_pages_before_the_window_are_not_read(
    library: Library, dtype: torch.dtype, size: int, kind: SmallNumbers | None
) -> None:
    """They may be another request's by then, and hold what is no number."""
    window = 100
    case = Case(replace(BASE, window=window), page_size=size, small=kind)
    prompt = rows_of(case, dtype, 460, 0)
    library.dll.sylvan_threads(2)
    whole, cut = Cache(library, case, dtype), Cache(library, case, dtype)
    for cache in (whole, cut):
        cache.step({1: prompt[:420]}, {1: 0})

    for first, last in ((420, 421), (421, 440), (440, 460)):
        gone = (first - window + 1) // size
        for side in (cut.pages.keys, cut.pages.values):
            side[cut.table[1, :gone]] = 0xFF
        cut.table[1, : gone // 2] = 0  # where the page of padding stands instead
        want = whole.step({1: prompt[first:last]}, {1: first})
        got = cut.step({1: prompt[first:last]}, {1: first})
        assert want.isfinite().all()
        assert torch.equal(got, want), (first, last)
