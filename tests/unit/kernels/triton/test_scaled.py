"""Keys and values in int8 and int4, with a scale for each token and head, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.pages import NIBBLES, Cache, LayerKV, token_scales
from sylvan.kernels.paged.triton_attention import decode, extend
from sylvan.kernels.paged.triton_heads import store_kv
from sylvan.kernels.paged.triton_scaled import rotate_heads
from sylvan.runtime.attention.triton import TritonAttention
from sylvan.runtime.pool.mha import KVShape, MHAPool
from tests.support.chosen import device_name, more
from tests.support.paged_batch import K, N, batch_of
from tests.support.tensors import ints, put, random, tolerance

KINDS = {"int8": torch.int8, "int4": NIBBLES}
THROUGH = {"int8": reference.through_int8, "int4": reference.through_int4}
LAYER = AttentionLayer(index=0, num_heads=6, num_kv_heads=3, head_dim=32, scale=0.2)
SLOTS = [9, 2, 31]


def pool(kind: str, width: int, pages: int, page: int = 16, heads: int = 3) -> MHAPool:
    shape = KVShape(
        num_layers=1, num_kv_heads=heads, head_dim=width, num_pages=pages, page_size=page
    )
    return MHAPool(shape, KINDS[kind], torch.device(device_name()))


def numbers(side: torch.Tensor) -> torch.Tensor:
    """Heads that a side stands for, (P, page, K, H), in float32."""
    scale = token_scales(side)[..., None]
    if side.dtype == torch.int8:
        return side.float() * scale
    levels = torch.cat((side & 15, side >> 4), -1)
    return reference.hadamard((levels.float() - 7.5) * scale)


@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(
    ("kind", "width"),
    [("int8", 24), ("int8", 32), ("int4", 32), *more(("int4", 128), ("int4", 256))],
)
def test_heads_are_rounded_by_their_largest_number(
    kind: str, width: int, dtype: torch.dtype
) -> None:
    keys, values = pool(kind, width, 3).layer(0)
    k, v = random(3, 3, width, dtype=dtype, seed=1), random(3, 3, width, dtype=dtype, seed=2)
    k[1, 2] = 0

    store_kv(k, v, Cache(keys=keys, values=values, slots_T=ints(SLOTS)))

    for side, x in ((keys, k), (values, v)):
        got = numbers(side).flatten(0, 1)
        want = THROUGH[kind](x)
        # A sum in another order may be rounded to the next level: of few, and by no more than that.
        step = x.float().norm(dim=-1, keepdim=True) / (7.5 if kind == "int4" else 127)
        assert ((got[SLOTS] - want).abs() <= step).all()
        assert ((got[SLOTS] - want).abs() > step / 100).float().mean() < 0.05
        codes = side.flatten(0, 1).clone()
        codes[SLOTS] = 0
        assert not codes.any()  # nothing else was written


def test_a_head_that_is_no_number_has_no_scale() -> None:
    for kind in KINDS:
        keys, values = pool(kind, 32, 3).layer(0)
        k, v = random(3, 3, 32, seed=1), random(3, 3, 32, seed=2)
        k[1, 2, 5] = float("nan")

        store_kv(k, v, Cache(keys=keys, values=values, slots_T=ints(SLOTS)))

        scales = token_scales(keys).flatten(0, 1)[SLOTS]
        assert scales.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("width", [32, *more(64, 128, 256)])
def test_rotation_is_its_own_inverse(width: int) -> None:
    x = random(5, 3, width, seed=4)

    once = rotate_heads(x)

    torch.testing.assert_close(once, reference.hadamard(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate_heads(once), x, rtol=1e-5, atol=1e-5)


LAYERS = {
    "plain": LAYER,
    "window and sinks": replace(LAYER, window=9, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 1, 0])),
    "capped": replace(LAYER, softcap=3.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("int8", "plain"),
        ("int4", "plain"),
        ("int8", "window and sinks"),
        *more(("int4", "window and sinks"), ("int8", "capped")),
    ],
)
def test_attention_reads_such_pages(kind: str, name: str, dtype: torch.dtype) -> None:
    layer, lens, starts = put(LAYERS[name]), [40, 9], [0, 1, 8]
    made = pool(kind, layer.head_dim, 8)
    keys, values = made.layer(0)
    table = ints([[5, 2, 7], [3, 0, 0]])
    for r, length in enumerate(lens):
        slots = (table[r].long()[:, None] * 16 + torch.arange(16, device=table.device)).flatten()
        k, v = (random(length, 3, 32, dtype=dtype, seed=seed + r) for seed in (1, 5))
        made.store(0, slots[:length], k, v)
    pages = LayerKV(
        keys=keys, values=values, table_SP=table, rows_R=ints([0, 1]), lens_R=ints(lens)
    )
    q = random(starts[-1], 6, 32, dtype=dtype, seed=9)
    turn = rotate_heads if kind == "int4" else torch.clone

    def want(r: int, rows: slice) -> torch.Tensor:
        mine = table[r].long()
        k, v = (numbers(side)[mine].flatten(0, 1)[: lens[r]] for side in (keys, values))
        return reference.attend(q[rows], k, v, layer).float().unflatten(1, (6, 32))

    limit = tolerance(dtype, 2e-5, 4e-3)
    some = turn(decode(turn(q[:2]), pages, layer)).float()
    for r in range(2):
        torch.testing.assert_close(some[r], want(r, slice(r, r + 1))[0], rtol=limit, atol=limit)
    all_of_them = turn(extend(turn(q), pages, ints(starts), layer)).float()
    for r in range(2):
        rows = slice(starts[r], starts[r + 1])
        torch.testing.assert_close(all_of_them[rows], want(r, rows), rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", KINDS)
def test_the_backend_keeps_heads_in_such_pages(kind: str) -> None:
    batch = batch_of([(0, 5), (0, 3)], KINDS[kind], device_name(), width=32)
    layer = AttentionLayer(index=0, num_heads=N, num_kv_heads=K, head_dim=32, scale=0.3)
    qkv = random(8, (N + 2 * K) * 32, seed=5)
    rope = Rope(random(16, 32, seed=6))
    norms = HeadNorm(random(32, seed=7), 1e-5, 1.0), None

    got = TritonAttention().run_fused(layer, qkv, rope, norms, batch)

    q, k, v = reference.split_heads(qkv, layer, batch.positions_T, rope, norms)
    through = THROUGH[kind]
    for rows in (slice(0, 5), slice(5, 8)):
        want = reference.attend(q[rows], through(k[rows]), through(v[rows]), layer)
        # a level that is rounded the other way counts a little
        torch.testing.assert_close(got[rows].flatten(1), want, rtol=2e-2, atol=2e-2)
