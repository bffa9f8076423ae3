"""Attention over pages in plain `jnp`: the reference for the Pallas kernels, and the CPU version.

Shapes: T rows, N tiles, B rows of a tile, H query heads, K key heads, G query heads of a key head,
D columns of a key, V of a value, P pages of a request, L tokens of P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.api import BlockPattern

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step in tiles, each of one request; unused rows have index T.

    Attributes:
        rows: Index of each row, int32 (N, B); None: tile n is row n.
        places: Position of each row in its request, int32 (N, B).
        ends: Each row sees tokens before this position, int32 (N, B).
        tables: Pages of the tile's request, int32 (N, P).
    """

    rows: Array | None
    places: Array
    ends: Array
    tables: Array

    def gather(self, x: Array) -> Array:
        """Rows (T, ...) as tiles (N, B, ...)."""
        if self.rows is None:
            return x[:, None]
        return x.at[self.rows].get(mode="fill", fill_value=0)

    def scatter(self, x: Array, count: int) -> Array:
        """Tiles (N, B, ...) as `count` rows; unused rows are zeros."""
        if self.rows is None:
            return x[:, 0]
        out = jnp.zeros((count, *x.shape[2:]), x.dtype)
        return out.at[self.rows].set(x, mode="drop")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """Definition of a layer; see `sylvan.kernels.api.AttentionLayer` and `AttentionVariant`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    blocks: BlockPattern | None = None

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads


class Biases(NamedTuple):
    """Numbers that change the scores of each head, float32; None: absent.

    Attributes:
        sinks: A logit of each head that takes part in the softmax but carries no value (H,).
        slopes: Amount by which a head's scores decrease per token of distance (H,).
        distances: Bias at distances 0 to E - 1; the last one also applies beyond (H, E).
        shifts: Shift of each head in a `BlockPattern`, int32 (H,).
    """

    sinks: Array | None = None
    slopes: Array | None = None
    distances: Array | None = None
    shifts: Array | None = None


class Attend(Protocol):
    """Attention of tiles of queries over the pages of their requests."""

    def __call__(
        self,
        q_NBHD: Array,
        keys: Array,
        values: Array | None,
        tiles: Tiles,
        spec: HeadSpec,
        biases: Biases,
    ) -> Array:
        """Weighted values.

        Args:
            q_NBHD: Queries.
            keys: (pages, K, page_size, D).
            values: (pages, K, page_size, V); None: the first V columns of the keys.
            tiles: Positions of rows, and their pages.
            spec: Definition of the layer.
            biases: Biases of its heads.

        Returns: (N, B, H, V) in the type of the queries.
        """
        ...


def attend(
    q_NBHD: Array,
    keys: Array,
    values: Array | None,
    tiles: Tiles,
    spec: HeadSpec,
    biases: Biases,
) -> Array:
    """Implements `Attend`: gathers the pages of each tile, then computes scores of all tokens."""
    tiles_N, rows_B = q_NBHD.shape[:2]
    kv, group = spec.num_kv_heads, spec.group
    k_NKLD = _gathered(keys, tiles.tables)
    v_NKLV = k_NKLD[..., : spec.value_dim] if values is None else _gathered(values, tiles.tables)
    q = q_NBHD.reshape(tiles_N, rows_B, kv, group, spec.head_dim).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("nbkgd,nkld->nkgbl", q, k_NKLD.astype(jnp.float32), precision=exact)
    sinks, slopes, distances, shifts = (
        None if x is None else x.reshape(kv, group, 1, -1) for x in biases
    )
    own, ends = tiles.places[:, None, None, :, None], tiles.ends[:, None, None, :, None]
    key = jnp.arange(k_NKLD.shape[2], dtype=jnp.int32)
    scores = biased(scores * spec.scale, (key, own), spec, slopes)
    if distances is not None:
        scores = scores + _of_distance(distances, tiles.places[:, :, None] - key)
    seen = sees((key, own), ends, spec, shifts)
    weights = softmax(jnp.where(seen, scores, -jnp.inf), sinks)
    out = jnp.einsum("nkgbl,nklv->nbkgv", weights, v_NKLV.astype(jnp.float32), precision=exact)
    return out.reshape(tiles_N, rows_B, spec.num_heads, spec.value_dim).astype(q_NBHD.dtype)


def biased(scores: Array, places: tuple[Any, Any], spec: HeadSpec, slopes: Array | None) -> Array:
    """Scaled and capped scores, minus the slope of the head per token of distance."""
    if spec.softcap:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if slopes is None:
        return scores
    key, own = places
    return scores + slopes * (key - own).astype(jnp.float32)


def _of_distance(biases_KGE: Array, distance_NBL: Array) -> Array:
    """Return the additions to the scores of each head: (N, K, G, B, L)."""
    table_EH = biases_KGE.reshape(-1, biases_KGE.shape[-1]).T
    found = table_EH[jnp.clip(distance_NBL, 0, table_EH.shape[0] - 1)]  # (N, B, L, H)
    found = found.transpose(0, 3, 1, 2)
    return found.reshape(found.shape[0], *biases_KGE.shape[:2], *found.shape[2:])


def sees(places: tuple[Any, Any], ends: Any, spec: HeadSpec, shifts: Array | None) -> Array:
    """Whether a row sees a token; `places` are the positions of the token and of the row.

    Divides by `lax`, because Pallas cannot lower `//` without knowing the chip.
    """
    div, (key, own) = jax.lax.div, places
    seen = key < ends
    if spec.window:
        seen &= key > own - spec.window
    if spec.chunk:
        seen &= div(key, spec.chunk) == div(own, spec.chunk)
    if spec.blocks is not None and shifts is not None:
        block = div(key, spec.blocks.size)
        far = jax.lax.rem(block + shifts, spec.blocks.stride) == 0
        seen &= far | (div(own, spec.blocks.size) - block < spec.blocks.near)
    return seen


def softmax(scores: Array, sinks: Array | None) -> Array:
    """Softmax over the last axis; zeros for rows that see no token."""
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return weights / jnp.where(total > 0, total, 1.0)


def store(pages: Array, slots: Array, rows: Array) -> Array:
    """Store rows (T, K, D) at their slots (T,) in pages (P, K, page_size, D)."""
    page, place = jnp.divmod(slots, pages.shape[2])
    return pages.at[page, :, place].set(rows.astype(pages.dtype))


def _gathered(pages: Array, tables: Array) -> Array:
    """(N, K, L, D) of each tile."""
    found = pages[tables].transpose(0, 2, 1, 3, 4)  # (N, K, P, page_size, D)
    return found.reshape(*found.shape[:2], -1, found.shape[4])
