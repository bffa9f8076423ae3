"""Head norms, rotary positions and the KV store against their reference."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, KVScales, Rope
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.pages import Cache, Rotary
from sylvan.kernels.paged.triton_heads import store_heads, store_kv
from tests.support.chosen import more
from tests.support.tensors import DTYPES, fp8, ints, put, random, tolerance

LAYER = AttentionLayer(index=0, num_heads=6, num_kv_heads=2, head_dim=24, scale=1.0, v_head_dim=16)
SLOTS = [9, 2, 31]
POSITIONS = [5, 0, 11]


def norm(length: int, dtype: torch.dtype) -> HeadNorm:
    return HeadNorm(random(length, dtype=dtype, seed=length), 1e-5, 1.0)


def empty(dtype: torch.dtype, scales: KVScales | None = None) -> Cache:
    keys, values = torch.zeros(4, 8, 2, 24), torch.zeros(4, 8, 2, 16)
    cache = Cache(keys=keys.to(dtype), values=values.to(dtype), slots_T=ints(SLOTS), scales=scales)
    return put(cache)


def stored(side: torch.Tensor) -> torch.Tensor:
    return side.flatten(0, 1)[SLOTS]


def turn(name: str, dtype: torch.dtype) -> Rotary:
    angles = random(12, 16, seed=5)
    norms = norm(24, dtype), norm(24, dtype)
    return {
        "nothing": Rotary(),
        "halves": Rotary(Rope(angles)),
        "neighbours": Rotary(Rope(angles, interleaved=True)),
        "norms": Rotary(Rope(angles), *norms),
        "norms of all heads": Rotary(Rope(angles), norm(6 * 24, dtype), norm(2 * 24, dtype)),
        "norm of keys only": Rotary(None, None, norms[1]),
    }[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    ["nothing", "halves", "neighbours", "norms", "norms of all heads", "norm of keys only"],
)
def test_heads_are_normed_turned_and_stored(name: str, dtype: torch.dtype) -> None:
    qkv, how, cache = random(3, 6 * 24 + 2 * 40, dtype=dtype), turn(name, dtype), empty(dtype)

    got = store_heads(qkv, LAYER, ints(POSITIONS), how, cache)

    norms = how.q_norm, how.k_norm
    q, k, v = reference.split_heads(qkv, LAYER, ints(POSITIONS), how.rope, norms)
    limit = tolerance(dtype, 1e-5, 2e-3)
    torch.testing.assert_close(got, q, rtol=limit, atol=limit)
    for side, want in ((cache.keys, k), (cache.values, v)):
        torch.testing.assert_close(stored(side), want, rtol=limit, atol=limit)
        side.flatten(0, 1)[SLOTS] = 0
        assert not side.any()  # nothing else was written


@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("exact", [True, *more(False)])
def test_fp8_stores_are_scaled_and_saturate(dtype: torch.dtype, exact: bool) -> None:
    narrow = fp8()
    scales = KVScales(put(torch.tensor([0.5, 0.25])), put(torch.tensor([2.0, 4.0])))
    cache, qkv = empty(narrow, scales), random(3, 6 * 24 + 2 * 40, dtype=dtype)
    if exact:
        # Numbers that fp8 holds: the interpreter forgets the carry of a mantissa that rounds up.
        qkv = qkv.to(narrow).to(dtype)
    qkv[0, 6 * 24] = 6e4

    store_heads(qkv, LAYER, ints(POSITIONS), Rotary(), cache)

    _, k, v = reference.split_heads(qkv, LAYER, ints(POSITIONS), None, (None, None))
    for side, want, scale in ((cache.keys, k, scales.keys), (cache.values, v, scales.values)):
        wanted = (want.float() / scale[:, None]).clamp(-448, 448).to(narrow).float()
        assert torch.equal(stored(side).float(), wanted)


def test_plain_store_takes_heads_that_lie_apart() -> None:
    cache, both = empty(torch.float32), random(3, 2, 40)

    store_kv(both[..., :24], both[..., 24:], cache)

    assert torch.equal(stored(cache.keys), both[..., :24])
    assert torch.equal(stored(cache.values), both[..., 24:])


def test_latent_store_writes_the_wide_key_once() -> None:
    keys = put(torch.zeros(4, 8, 1, 24))
    cache = Cache(keys=keys, values=keys[..., :16], slots_T=ints(SLOTS))
    wide = random(3, 1, 24)

    store_kv(wide, wide[..., :16] * 0, cache)

    assert torch.equal(stored(keys), wide)
