"""Paged attention against its reference; few, wide programs in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sylvan.kernels.api import AttentionLayer, KVScales
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.pages import LayerKV
from sylvan.kernels.paged.triton_attention import decode, extend
from tests.support.chosen import more
from tests.support.tensors import fp8, ints, put, random, tolerance

PLAIN = AttentionLayer(index=0, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)
LAYERS = {
    "grouped": PLAIN,
    "one head each": replace(PLAIN, num_heads=2),
    "three a group": replace(PLAIN, num_heads=6, head_dim=16),
    "odd head": replace(PLAIN, head_dim=40),
    "small head": replace(PLAIN, head_dim=8),
    "narrow values": replace(PLAIN, head_dim=48, v_head_dim=20),
    "capped": replace(PLAIN, softcap=3.0),
    "window": replace(PLAIN, window=37),
    "sinks": replace(PLAIN, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "window and sinks": replace(PLAIN, window=5, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}
SCALES = torch.tensor([0.5, 0.3] * 4), torch.tensor([2.0, 0.7] * 4)
LAYERS["slopes"] = replace(PLAIN, slopes=torch.tensor([0.5, 0.25, 0.125, 0.03]))
LAYERS["chunks"] = replace(PLAIN, chunk=24)
WIDTHS = {f"heads of {width}": replace(PLAIN, head_dim=width) for width in (64, 80, 128, 256)}
LAYERS |= WIDTHS
HALF = ("grouped", "capped", "window and sinks", "heads of 80")
CASES = [(name, torch.float32) for name in LAYERS] + [(name, torch.float16) for name in HALF]
CASES += more(*((name, torch.bfloat16) for name in LAYERS))
LARGE = replace(PLAIN, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
LAYERS["large"] = LARGE
CASES += more(("large", torch.bfloat16), ("large", torch.float16))


def cache(
    layer: AttentionLayer, lens: list[int], page: int, dtype: torch.dtype, shared: bool = False
) -> LayerKV:
    """Random pages in random order; what no request owns is not a number."""
    most = max(1, -(-max(lens) // page))
    count = len(lens) * most + 1
    size = (count, page, layer.num_kv_heads, layer.head_dim)
    keys = random(*size, dtype=dtype, seed=1)
    values = random(*size[:3], layer.value_dim, dtype=dtype, seed=2)
    keys[0] = values[0] = float("nan")
    generator = torch.Generator().manual_seed(1)
    table = put(torch.randperm(count - 1, generator=generator).to(torch.int32).view(-1, most) + 1)
    rows = put(torch.randperm(len(lens), generator=generator).to(torch.int32))
    pages = LayerKV(
        keys=keys,
        values=keys[..., : layer.value_dim] if shared else values,
        table_SP=table,
        rows_R=rows,
        lens_R=ints(lens),
    )
    for r, length in enumerate(lens):  # beyond its end too, and in pages it has not reached
        mine = table[rows[r]].long()
        for side in (pages.keys, pages.values):
            flat = side[mine].flatten(0, 1)
            flat[length:] = float("nan")
            side[mine] = flat.unflatten(0, (most, page))
            table[rows[r], -(-length // page) :] = 0
    return pages


def attend(
    q: torch.Tensor,
    starts: list[int],
    pages: LayerKV,
    layer: AttentionLayer,
    ends_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference, request by request; zeros where a request has no KV."""
    out = torch.zeros(len(q), layer.num_heads, layer.value_dim, device=q.device)
    for r, length in enumerate(pages.lens_R.tolist()):
        mine = pages.table_SP[pages.rows_R[r]].long()
        k, v = (side[mine].flatten(0, 1)[:length].float() for side in (pages.keys, pages.values))
        if pages.scales is not None:
            k, v = k * pages.scales.keys[:, None], v * pages.scales.values[:, None]
        rows = slice(starts[r], starts[r + 1])
        if length and layer.chunk:
            for row in range(rows.start, rows.stop):
                last = length - rows.stop + row
                seen = slice(last // layer.chunk * layer.chunk, last + 1)
                got = reference.attend(q[row : row + 1], k[seen], v[seen], layer)
                out[row] = got.float().unflatten(1, (-1, layer.value_dim))[0]
        elif length:
            ends = None if ends_T is None else ends_T[rows]
            got = reference.attend(q[rows], k, v, layer, ends_T=ends)
            out[rows] = got.float().unflatten(1, (-1, layer.value_dim))
    return out


def queries(layer: AttentionLayer, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return random(rows, layer.num_heads, layer.head_dim, dtype=dtype, seed=3)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    limit = tolerance(got.dtype, 2e-5, 3e-3)
    torch.testing.assert_close(got.float(), want.float(), rtol=limit, atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_decode_looks_at_all_pages(name: str, dtype: torch.dtype) -> None:
    layer, lens = put(LAYERS[name]), [70, 1, 0, *more(2500, 777, 64)]
    pages = cache(layer, lens, 16, dtype)
    q = queries(layer, len(lens), dtype)

    got = decode(q, pages, layer)

    close(got, attend(q, list(range(len(lens) + 1)), pages, layer))


@pytest.mark.slow
@pytest.mark.parametrize("page", [16, 64, 10])
def test_pages_before_the_window_are_not_read(page: int) -> None:
    layer, window = replace(PLAIN, window=37), 37
    lens, starts = [130, 99, 64], [0, 40, 41, 44]
    pages = cache(layer, lens, page, torch.float32)
    q = queries(layer, starts[-1], torch.float32)
    last = torch.tensor(starts[1:]) - 1
    want = attend(q, starts, pages, layer)
    alone = attend(q[last], [0, 1, 2, 3], pages, layer)

    for r, length in enumerate(lens):
        rows = starts[r + 1] - starts[r]
        row = int(pages.rows_R[r])
        gone = max(0, length - rows - window + 1) // page
        mine = pages.table_SP[row, :gone].long()
        pages.keys[mine] = pages.values[mine] = float("nan")
        pages.table_SP[row, : gone // 2] = 0
    close(extend(q, pages, ints(starts), layer), want)

    for r, length in enumerate(lens):
        gone = max(0, length - window) // page
        mine = pages.table_SP[int(pages.rows_R[r]), :gone].long()
        pages.keys[mine] = pages.values[mine] = float("nan")
    close(decode(q[last], pages, layer), alone)


@pytest.mark.slow
@pytest.mark.parametrize("page", [64, 10])
def test_decode_merges_splits(page: int) -> None:
    layer = put(replace(PLAIN, num_heads=2, sinks=torch.tensor([1.0, 2.0])))
    lens = [600, 300]
    pages = cache(layer, lens, page, torch.float32)
    q = queries(layer, len(lens), torch.float32)

    close(decode(q, pages, layer), attend(q, [0, 1, 2], pages, layer))


@pytest.mark.slow
def test_decode_of_a_row_does_not_depend_on_the_other_rows() -> None:
    layer = PLAIN
    pages = cache(layer, [600, 40, 7], 32, torch.float32)
    q = queries(layer, 3, torch.float32)

    together = decode(q, pages, layer)

    alone = replace(pages, rows_R=pages.rows_R[:1], lens_R=pages.lens_R[:1])
    assert torch.equal(decode(q[:1], alone, layer), together[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_extend_sees_the_prefix_and_not_the_future(name: str, dtype: torch.dtype) -> None:
    layer = put(LAYERS[name])
    lens, starts = [50, 3, 75, 9, *more(900, 300)], [0, 33, 34, 34, 43, *more(443, 743)]
    pages = cache(layer, lens, 16, dtype)
    q = queries(layer, starts[-1], dtype)

    got = extend(q, pages, ints(starts), layer)

    close(got, attend(q, starts, pages, layer))


@pytest.mark.parametrize("dtype", [torch.float16, *more(torch.bfloat16)])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("name", ["grouped", *more("large", "capped", "sinks", "heads of 256")])
def test_blocks_of_a_long_prefix_are_copied_by_descriptors(
    name: str, page: int, dtype: torch.dtype
) -> None:
    layer = put(LAYERS[name])
    lens, starts = [200, 70, *more(900)], [0, 3, 4, *more(304)]
    pages = cache(layer, lens, page, dtype)
    q = queries(layer, starts[-1], dtype)

    got = extend(q, pages, ints(starts), layer)

    close(got, attend(q, starts, pages, layer))


def test_extend_without_causality_sees_everything() -> None:
    layer, lens, starts = replace(PLAIN, causal=False), [40, 21], [0, 40, 61]
    pages = cache(layer, lens, 8, torch.float32)
    q = queries(layer, starts[-1], torch.float32)

    got = extend(q, pages, ints(starts), layer)

    close(got, attend(q, starts, pages, layer))


@pytest.mark.parametrize("window", [None, 12, *more(300)])
def test_extend_shows_rows_tokens_up_to_their_ends(window: int | None) -> None:
    """Runs of tokens that see each other, within blocks and across; plain rows need none."""
    layer = replace(PLAIN, window=window)
    lens, starts = [60, 3, 50, *more(900)], [0, 50, 51, 71, *more(771)]
    pages, rows = cache(layer, lens, 8, torch.float32), starts[-1]
    q = queries(layer, rows, torch.float32)
    ends = torch.zeros(rows, dtype=torch.int32)
    ends[5:12], ends[20:50], ends[55:60] = 22, 60, 39
    if len(lens) > 3:
        ends[100:700] = 830

    got = extend(q, pages, ints(starts), layer, ends_T=put(ends))

    close(got, attend(q, starts, pages, layer, put(ends)))
    assert not torch.allclose(got, attend(q, starts, pages, layer), atol=1e-3)


def test_extend_leaves_padding_rows_alone() -> None:
    pages = cache(PLAIN, [5], 8, torch.float32)
    q, out = queries(PLAIN, 9, torch.float32), put(torch.full((9, 4, 32), 7.0))

    extend(q, pages, ints([0, 5]), PLAIN, out)

    close(out[:5], attend(q[:5], [0, 5], pages, PLAIN))
    assert (out[5:] == 7.0).all()


@pytest.mark.parametrize(
    ("width", "value", "dtype"),
    [
        (48, 32, torch.float32),
        (48, 32, torch.float16),
        (32, 24, torch.float32),
        *more((576, 512, torch.bfloat16), (576, 512, torch.float16)),
    ],
)
def test_latent_attention_reads_values_out_of_keys(
    width: int, value: int, dtype: torch.dtype
) -> None:
    layer = replace(PLAIN, num_heads=20, num_kv_heads=1, head_dim=width, v_head_dim=value)
    starts = [0, 3, 4]
    pages = cache(layer, [30, 17], 16, dtype, shared=True)
    q = queries(layer, starts[-1], dtype)

    close(
        extend(q, pages, ints(starts), layer),
        attend(q, starts, pages, layer),
    )
    close(decode(q[2:], pages, layer), attend(q[2:], [0, 1, 2], pages, layer))


@pytest.mark.parametrize("dtype", [torch.float16, *more(torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("name", ["grouped", *more("large", "heads of 80", "window and sinks")])
def test_fp8_pages_are_scaled_back(name: str, dtype: torch.dtype) -> None:
    layer, lens, starts = put(LAYERS[name]), [40, 9, *more(1500)], [0, 1, 2, *more(302)]
    pages, narrow = cache(layer, lens, 16, dtype), fp8()
    pages = replace(
        pages,
        scales=KVScales(*(put(s[: layer.num_kv_heads]) for s in SCALES)),
        keys=pages.keys.nan_to_num(0.0).to(narrow),
        values=pages.values.nan_to_num(0.0).to(narrow),
    )
    q = queries(layer, starts[-1], dtype)
    each = list(range(len(lens) + 1))

    close(decode(q[: len(lens)], pages, layer), attend(q[: len(lens)], each, pages, layer))
    close(extend(q, pages, ints(starts), layer), attend(q, starts, pages, layer))
