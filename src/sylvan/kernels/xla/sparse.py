"""Lowerings of attention to tokens selected by an indexer.

A page holds a row for each token: its latent columns, then its index key.

Shapes: T rows, N tiles, B rows of a tile, H heads, C latent and rotary columns, I columns of a
head of the index, G its heads, L tokens of the pages of a request, K chosen tokens, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.native.opset import IndexChoice, Source, SparseAttention, TokenPages, TokenStore
from sylvan.kernels.xla.attention import Tiles, store
from sylvan.kernels.xla.heads import rotate
from sylvan.kernels.xla.values import DTYPES, Values

Array: TypeAlias = jax.Array
_EXACT = jax.lax.Precision.HIGHEST


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Positions of the selected tokens by tile and row, int32 (N, B, K); -1: none."""

    places: Array


def token_store(v: Values, op: TokenStore) -> None:
    """Store the latent of each row and its rotated index key; rotate the indexer's queries."""
    heads, cols = op.num_heads, op.pages.cols
    key = v.rows(op.qkv)[:, heads * cols : (heads + 1) * cols]
    kind = key.dtype
    own = jnp.zeros((key.shape[0], op.pages.key_cols), kind)
    if op.k is not None:
        assert op.q is not None
        assert op.cos_sin is not None
        table = v.table(op.cos_sin, op.rotary_dim)[v.step.sources[Source.POSITIONS]]
        own = rotate(v.wide(op.k)[:, None], table, interleaved=op.interleaved)[:, 0].astype(kind)
        q_TGI = v.wide(op.q).reshape(key.shape[0], op.index_heads, -1)
        rotated = rotate(q_TGI, table, interleaved=op.interleaved)
        v.buffers[op.q] = rotated.reshape(key.shape[0], -1).astype(kind)
    layer, slots = _layer(v, op.pages), v.step.slots[op.pages.table]
    pages, values = v.pages[layer]
    v.pages[layer] = store(pages, slots, jnp.concatenate((key, own), -1)[:, None]), values


def index_choice(v: Values, op: IndexChoice) -> None:
    """Select the best tokens of each row, or all if it sees at most K; ties: the earlier token."""
    tiles = v.step.tiles[op.pages.table]
    size = op.pages.key_cols
    q_NBGI = tiles.gather(v.wide(op.q)).reshape(*tiles.places.shape, op.index_heads, size)
    weights_NBG = tiles.gather(v.wide(op.weights))
    keys_NLI = _rows(v, op.pages, tiles)[..., op.pages.cols :].astype(jnp.float32)
    dots = jnp.einsum("nbgi,nli->nbgl", q_NBGI, keys_NLI, precision=_EXACT)
    scores = jnp.einsum("nbgl,nbg->nbl", jax.nn.relu(dots), weights_NBG, precision=_EXACT)
    seen = jnp.arange(keys_NLI.shape[1], dtype=jnp.int32) < tiles.ends[..., None]
    best, places = jax.lax.top_k(
        jnp.where(seen, scores, -jnp.inf), min(op.top_k, keys_NLI.shape[1])
    )
    v.buffers[op.chosen] = ChosenTokens(jnp.where(best > -jnp.inf, places, -1))


def sparse_attention(v: Values, op: SparseAttention) -> None:
    """Attention of queries to the selected tokens, in float32."""
    tiles, chosen = v.step.tiles[op.pages.table], v.buffers[op.chosen]
    assert isinstance(chosen, ChosenTokens)
    heads, cols = op.num_heads, op.pages.cols
    q = v.rows(op.qkv)[:, : heads * cols].reshape(-1, heads, cols)
    there = chosen.places >= 0
    places = jnp.maximum(chosen.places, 0)
    page, place = jnp.divmod(places, op.pages.page_size)
    numbers = jnp.take_along_axis(tiles.tables[:, None], page, -1)  # (N, B, K)
    pages = v.pages[_layer(v, op.pages)][0]
    rows_NBKC = pages[numbers, 0, place, :cols].astype(jnp.float32)
    q_NBHC = tiles.gather(q).astype(jnp.float32)
    scores = jnp.einsum("nbhc,nbkc->nbhk", q_NBHC, rows_NBKC, precision=_EXACT) * op.scale
    scores = jnp.where(there[:, :, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    values = rows_NBKC[..., : op.value_dim]
    out = jnp.einsum("nbhk,nbkv->nbhv", weights, values, precision=_EXACT)
    made = tiles.scatter(out.astype(DTYPES[op.dtype]), q.shape[0])
    v.put(op.out, made.reshape(q.shape[0], -1), op)


def _layer(v: Values, pages: TokenPages) -> int:
    return v.layers[~pages.latents]


def _rows(v: Values, pages: TokenPages, tiles: Tiles) -> Array:
    """Return the cached rows of all tokens of each tile's request: (N, L, C + I)."""
    found = v.pages[_layer(v, pages)][0][tiles.tables]  # (N, P, 1, page_size, C + I)
    return found.reshape(found.shape[0], -1, found.shape[-1])
