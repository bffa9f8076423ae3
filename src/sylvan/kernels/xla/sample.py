"""Samples tokens on the device, with the same random numbers as all other samplers.

The definition is that of `sylvan.runtime.sampling.draw`. Probabilities are summed in float64, so
the functions here are traced with 64-bit types.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
NO_TOP_K = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawRows:
    """Parameters of the rows to draw, each (R,).

    `seed`, `sample` and `position` int64 are the key of a row's random number.
    """

    greedy: Array  # bool
    temperature: Array  # float32, as are the next two
    top_p: Array
    min_p: Array
    top_k: Array  # int32; NO_TOP_K: all
    seed: Array
    sample: Array
    position: Array


def philox(counter: tuple[Array, ...], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Philox4x32-10 over many counters at once: four words, and two of the key, uint32 (R,)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_WEYL[0]), k1 + jnp.uint32(_WEYL[1])
    return c0, c1, c2, c3


def _product(x: Array, factor: int) -> tuple[Array, Array]:
    """High and low word of a product of two words."""
    whole = x.astype(jnp.uint64) * jnp.uint64(factor)
    return (whole >> jnp.uint64(32)).astype(jnp.uint32), whole.astype(jnp.uint32)


def uniform(seed: Array, sample: Array, position: Array) -> Array:
    """One number in [0, 1) with 53 random bits for each key: float64 (R,)."""
    seeds, places = seed.astype(jnp.uint64), position.astype(jnp.uint64)
    counter = *_words(places), sample.astype(jnp.uint32), jnp.zeros_like(places, jnp.uint32)
    words = philox(counter, _words(seeds))
    high, low = words[0] >> jnp.uint32(5), words[1] >> jnp.uint32(6)
    return (high.astype(jnp.float64) * 2.0**26 + low.astype(jnp.float64)) / 2.0**53


def _words(x: Array) -> tuple[Array, Array]:
    """Low and high word."""
    return x.astype(jnp.uint32), (x >> jnp.uint64(32)).astype(jnp.uint32)


def greedy(logits_RV: Array) -> Array:
    """The best id of each row, int32 (R,); -1 where no token is valid."""
    clean = _cleaned(logits_RV)
    return _possible(clean, jnp.argmax(clean, -1).astype(jnp.int32))


def draw(logits_RV: Array, rows: DrawRows) -> Array:
    """Ids int32 (R,), -1 where no token is valid."""
    clean = _cleaned(logits_RV)
    best = jnp.argmax(clean, -1)
    ids = jnp.where(rows.greedy, best, _random(clean, rows))
    return _possible(clean, ids.astype(jnp.int32))


def _cleaned(logits_RV: Array) -> Array:
    """Replace NaN by minus infinity, and infinity by the largest finite number."""
    most = float(jnp.finfo(jnp.float32).max)
    return jnp.nan_to_num(logits_RV, nan=-jnp.inf, posinf=most, neginf=-jnp.inf)


def _possible(clean_RV: Array, ids_R: Array) -> Array:
    return jnp.where(clean_RV.max(-1) > -jnp.inf, ids_R, -1)


def _random(clean_RV: Array, rows: DrawRows) -> Array:
    lowest = float(jnp.finfo(jnp.float32).min)
    best = jnp.maximum(clean_RV.max(-1, keepdims=True), lowest)
    probs_RV = jax.nn.softmax((clean_RV - best) / rows.temperature[:, None], -1)
    order = jnp.argsort(-clean_RV, -1, stable=True)  # ties by ascending id
    kept = _kept(jnp.take_along_axis(probs_RV, order, -1), rows)
    places = jnp.arange(order.shape[0])[:, None], order
    is_kept = jnp.zeros(kept.shape, jnp.bool_).at[places].set(kept)
    sums = jnp.cumsum(jnp.where(is_kept, probs_RV, 0.0).astype(jnp.float64), -1)
    total = sums[:, -1]
    u = uniform(rows.seed, rows.sample, rows.position)
    target = jnp.minimum(u * total, jnp.nextafter(total, jnp.zeros_like(total)))
    found = jax.vmap(lambda row, x: jnp.searchsorted(row, x, side="right"))(sums, target)
    return jnp.minimum(found, clean_RV.shape[1] - 1)


def _kept(sorted_RV: Array, rows: DrawRows) -> Array:
    """Mask of the sorted ids that top-k, top-p and min-p keep."""
    top_k, top_p, min_p = (x[:, None] for x in (rows.top_k, rows.top_p, rows.min_p))
    p = sorted_RV.astype(jnp.float64)
    first_k = jnp.arange(p.shape[1], dtype=jnp.int32) < top_k
    before = jnp.cumsum(p, -1) - p
    within = jnp.where(first_k, p, 0.0).sum(-1, keepdims=True)
    whole = jnp.where(min_p > 0, within, 1.0)
    kept = first_k & (before < top_p.astype(jnp.float64) * whole)
    kept &= sorted_RV >= min_p * sorted_RV[:, :1]
    plain = (top_k >= NO_TOP_K) & (top_p >= 1) & (min_p <= 0)
    return kept | plain


jax.tree_util.register_dataclass(
    DrawRows,
    data_fields=(
        "greedy",
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "seed",
        "sample",
        "position",
    ),
    meta_fields=(),
)
