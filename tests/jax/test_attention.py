"""The Pallas kernels, interpreted, against plain `jnp`, and that against PyTorch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from sylvan.kernels.api import AttentionLayer, BlockPattern
from sylvan.kernels.paged import reference
from sylvan.kernels.xla.attention import Biases, HeadSpec, Tiles, attend, store
from sylvan.kernels.xla.pallas import PallasAttend

PAGE, PAGES = 16, 24
SPEC = HeadSpec(num_heads=6, num_kv_heads=2, head_dim=24, value_dim=24, scale=0.3)
SPECS = {
    "plain": SPEC,
    "window": dataclasses.replace(SPEC, window=13),
    "chunk": dataclasses.replace(SPEC, chunk=20),
    "softcap": dataclasses.replace(SPEC, softcap=2.0),
    "blocks": dataclasses.replace(SPEC, blocks=BlockPattern(size=4, near=3, stride=4, step=1)),
    "latent": dataclasses.replace(SPEC, num_kv_heads=1, value_dim=16),
}
LENGTHS = 41, 1, 16  # of three requests


def case(spec, rows, dtype=jnp.float32):
    """Pages of three requests, and tiles of their last rows; one tile is not used."""
    rng = np.random.default_rng(3)
    size = PAGES, spec.num_kv_heads, PAGE, spec.head_dim
    keys = jnp.asarray(rng.normal(size=size), dtype)
    values = None
    if spec.value_dim == spec.head_dim:
        values = jnp.asarray(rng.normal(size=size), dtype)
    tables = jnp.asarray(rng.permutation(np.arange(1, PAGES))[:12].reshape(4, 3), jnp.int32)
    places = np.zeros((4, rows), np.int32)
    ends = np.zeros((4, rows), np.int32)
    for tile, length in enumerate(LENGTHS):
        own = np.arange(max(0, length - rows), length)
        places[tile, : len(own)], ends[tile, : len(own)] = own, own + 1
    q = jnp.asarray(rng.normal(size=(4, rows, spec.num_heads, spec.head_dim)), dtype)
    numbers = None if rows == 1 else jnp.arange(4 * rows, dtype=jnp.int32).reshape(4, rows)
    return q, keys, values, Tiles(numbers, jnp.asarray(places), jnp.asarray(ends), tables)


def biases(spec, name):
    rng = np.random.default_rng(5)
    some = jnp.asarray(rng.normal(size=spec.num_heads), jnp.float32)
    far = jnp.asarray(rng.normal(size=(spec.num_heads, 9)), jnp.float32)
    found = {
        "none": Biases(),
        "sinks": Biases(sinks=some),
        "slopes": Biases(slopes=jnp.abs(some)),
        "distances": Biases(distances=far),
    }[name]
    if spec.blocks is None:
        return found
    return found._replace(shifts=jnp.asarray(spec.blocks.shifts(spec.num_heads), jnp.int32))


@pytest.mark.parametrize("rows", [1, 8], ids=["decode", "extend"])
@pytest.mark.parametrize("bias", ["none", "sinks", "slopes", "distances"])
@pytest.mark.parametrize("name", SPECS)
def test_kernels_compute_what_jnp_computes(name, bias, rows):
    spec, (q, keys, values, tiles) = SPECS[name], case(SPECS[name], rows)

    wanted = attend(q, keys, values, tiles, spec, biases(spec, bias))
    found = PallasAttend(interpret=True)(q, keys, values, tiles, spec, biases(spec, bias))

    assert float(jnp.abs(wanted).max()) > 0.1
    assert not wanted[3].any(), "a tile without rows gives zeros"
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bias", ["none", "sinks", "slopes", "distances"])
@pytest.mark.parametrize("name", [name for name in SPECS if name not in {"chunk", "blocks"}])
def test_jnp_computes_what_pytorch_computes(name, bias):
    spec, (q, keys, values, tiles) = SPECS[name], case(SPECS[name], 8)
    given = biases(spec, bias)
    sinks, slopes, far = (None if x is None else torch.tensor(np.asarray(x)) for x in given[:3])
    layer = AttentionLayer(
        index=0,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.value_dim,
        scale=spec.scale,
        window=spec.window or None,
        softcap=spec.softcap or None,
        sinks=sinks,
        slopes=slopes,
        biases=None if far is None else far.flatten(),
    )

    found = np.asarray(attend(q, keys, values, tiles, spec, given))

    for tile, length in enumerate(LENGTHS):
        count = min(8, length)
        table = np.asarray(tiles.tables[tile])
        k = tokens(keys, table, length)
        v = k[..., : spec.value_dim] if values is None else tokens(values, table, length)
        rows = torch.tensor(np.asarray(q[tile, :count]))
        wanted = reference.attend(rows, k, v, layer)
        np.testing.assert_allclose(
            found[tile, :count].reshape(count, -1), wanted.numpy(), atol=2e-5, rtol=2e-5
        )


def tokens(pages, table, length):
    """Those of a request, (S, K, D)."""
    found = np.asarray(pages)[table].transpose(0, 2, 1, 3)
    return torch.tensor(found.reshape(-1, *found.shape[2:])[:length].copy())


def test_rows_are_stored_where_their_slots_are():
    pages = jnp.zeros((4, 2, PAGE, 3))
    rows = jnp.arange(18.0).reshape(3, 2, 3) + 1

    found = np.asarray(store(pages, jnp.array([17, 2 * PAGE + 15, 0]), rows))

    assert (found[1, :, 1] == rows[0]).all()
    assert (found[2, :, 15] == rows[1]).all()
    assert (found[0, :, 0] == rows[2]).all()
    assert np.count_nonzero(found) == 18


@pytest.mark.parametrize("rows", [1, 16], ids=["decode", "extend"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(
    "also",
    [{}, {"chunk": 64}, {"blocks": BlockPattern(size=64, near=16, stride=8, step=1)}],
    ids=["plain", "chunk", "blocks"],
)
@pytest.mark.parametrize("heads", [(14, 2, 64, 64), (32, 8, 128, 128), (16, 1, 576, 512)])
def test_kernels_are_lowered_for_tpus(heads, also, dtype, rows):
    count, kv, dim, value = heads
    spec = HeadSpec(
        num_heads=count, num_kv_heads=kv, head_dim=dim, value_dim=value, scale=0.1, **also
    )
    q, keys, values, tiles = case(spec, rows, dtype)

    def run(q, keys, values, places, ends, tables):
        tiled = Tiles(tiles.rows, places, ends, tables)
        return PallasAttend(interpret=False)(q, keys, values, tiled, spec, biases(spec, "none"))

    given = q, keys, values, tiles.places, tiles.ends, tiles.tables
    made = export.export(jax.jit(run), platforms=["tpu"])(*given)

    assert "tpu_custom_call" in made.mlir_module()
