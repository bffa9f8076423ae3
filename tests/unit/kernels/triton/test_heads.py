"""Head norms, rotary positions and the KV store against their reference."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.pages import Cache, Rotary
from sylvan.kernels.paged.triton_heads import store_heads, store_kv

LAYER = AttentionLayer(index=0, num_heads=6, num_kv_heads=2, head_dim=24, scale=1.0, v_head_dim=16)
SLOTS = torch.tensor([9, 2, 31], dtype=torch.int32)
POSITIONS = torch.tensor([5, 0, 11], dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(length: int, dtype: torch.dtype) -> HeadNorm:
    return HeadNorm(random(length, dtype=dtype, seed=length), 1e-5, 1.0)


def empty(dtype: torch.dtype, **scales: float) -> Cache:
    keys, values = torch.zeros(4, 8, 2, 24), torch.zeros(4, 8, 2, 16)
    return Cache(keys=keys.to(dtype), values=values.to(dtype), slots_T=SLOTS, **scales)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["nothing", "halves", "neighbours", "norms", "norms of all heads", "norm of keys only"],
)
def test_heads_are_normed_turned_and_stored(name: str, dtype: torch.dtype) -> None:
    qkv, how, cache = random(3, 6 * 24 + 2 * 40, dtype=dtype), turn(name, dtype), empty(dtype)

    got = store_heads(qkv, LAYER, POSITIONS, how, cache)

    norms = how.q_norm, how.k_norm
    q, k, v = reference.split_heads(qkv, LAYER, POSITIONS, how.rope, norms)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got, q, rtol=limit, atol=limit)
    for side, want in ((cache.keys, k), (cache.values, v)):
        flat = side.flatten(0, 1)
        torch.testing.assert_close(flat[SLOTS.long()], want, rtol=limit, atol=limit)
        flat[SLOTS.long()] = 0
        assert not flat.any()  # nothing else was written


def test_fp8_stores_are_scaled_and_saturate() -> None:
    cache = empty(torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0)
    # Numbers that fp8 holds: the interpreter forgets the carry of a mantissa that rounds up.
    qkv = random(3, 6 * 24 + 2 * 40).to(torch.float8_e4m3fn).float()
    qkv[0, 6 * 24] = 1e6

    store_heads(qkv, LAYER, POSITIONS, Rotary(), cache)

    _, k, v = reference.split_heads(qkv, LAYER, POSITIONS, None, (None, None))
    for side, want, scale in ((cache.keys, k, 0.5), (cache.values, v, 2.0)):
        stored = side.flatten(0, 1)[SLOTS.long()].float()
        wanted = (want / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(stored, wanted)


def test_plain_store_takes_heads_that_lie_apart() -> None:
    cache, both = empty(torch.float32), random(3, 2, 40)

    store_kv(both[..., :24], both[..., 24:], cache)

    assert torch.equal(cache.keys.flatten(0, 1)[SLOTS.long()], both[..., :24])
    assert torch.equal(cache.values.flatten(0, 1)[SLOTS.long()], both[..., 24:])


def test_latent_store_writes_the_wide_key_once() -> None:
    keys = torch.zeros(4, 8, 1, 24)
    cache = Cache(keys=keys, values=keys[..., :16], slots_T=SLOTS)
    wide = random(3, 1, 24)

    store_kv(wide, wide[..., :16] * 0, cache)

    assert torch.equal(keys.flatten(0, 1)[SLOTS.long()], wide)
