"""Attention over pages as Pallas kernels: one for decoding, one for rows of prompts.

The grid runs over tiles of rows, key heads and pages. Page numbers are prefetched scalars, so the
next page is copied while one is computed. The online softmax keeps its sums in scratch memory
between the pages of a tile. Pages that a tile does not see are neither copied nor computed.

Shapes: N tiles, K key heads, R rows of a tile times query heads of a key head, P pages.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sylvan.kernels.xla.attention import Biases, HeadSpec, Tiles, attend, biased, sees

Array: TypeAlias = jax.Array
_MASKED = -1e30
"""Used instead of minus infinity, whose differences are NaN."""


def _kernel(
    tables: Any,
    spans: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    places_ref: Any,
    ends_ref: Any,
    sinks_ref: Any,
    slopes_ref: Any,
    shifts_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    *,
    spec: HeadSpec,
    page_size: int,
) -> None:
    """One page of one key head for one tile; see `_attend` for the operands."""
    del tables  # used by the index maps
    tile, page = pl.program_id(0), pl.program_id(2)

    @pl.when(page == 0)
    def _begin() -> None:
        top_ref[...] = sinks_ref[0]
        total_ref[...] = jnp.where(sinks_ref[0] > _MASKED, 1.0, 0.0)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    first, last = spans[tile, 0], spans[tile, 1]

    @pl.when((page >= first) & (page < last))
    def _add() -> None:
        q, k = q_ref[0, 0].astype(jnp.float32), k_ref[0, 0].astype(jnp.float32)
        v = k[:, : spec.value_dim] if v_ref is None else v_ref[0, 0].astype(jnp.float32)
        scores = jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
        )
        own, ends = places_ref[0], ends_ref[0]  # (R, 1)
        key = page * page_size + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = biased(scores * spec.scale, (key, own), spec, slopes_ref[0])
        seen = sees((key, own), ends, spec, shifts_ref[0])
        scores = jnp.where(seen, scores, _MASKED)
        before = top_ref[...]
        top = jnp.maximum(before, scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        less = jnp.exp(before - top)
        top_ref[...] = top
        total_ref[...] = total_ref[...] * less + weights.sum(-1, keepdims=True)
        sum_ref[...] = sum_ref[...] * less + jax.lax.dot_general(
            weights, v, (((1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST
        )

    @pl.when(page == pl.num_programs(2) - 1)
    def _end() -> None:
        total = total_ref[...]
        out_ref[0, 0] = (sum_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)


def decode(
    q_NHD: Array,
    pages: tuple[Array, Array | None],
    tiles: Tiles,
    spec: HeadSpec,
    biases: Biases,
    *,
    interpret: bool = False,
) -> Array:
    """Attention of one row of each request: a tile is its query heads. Shape: (N, H, V)."""
    rows = _by_head(q_NHD[:, None], spec)
    return _rows(_attend(rows, pages, tiles, spec, biases, interpret), 1, spec)[:, 0]


def extend(
    q_NBHD: Array,
    pages: tuple[Array, Array | None],
    tiles: Tiles,
    spec: HeadSpec,
    biases: Biases,
    *,
    interpret: bool = False,
) -> Array:
    """Attention of several rows of each request. Shape: (N, B, H, V)."""
    rows = _by_head(q_NBHD, spec)
    return _rows(_attend(rows, pages, tiles, spec, biases, interpret), q_NBHD.shape[1], spec)


class PallasAttend:
    """Implements `Attend`; `interpret` runs the kernels without a TPU, slowly."""

    def __init__(self, *, interpret: bool) -> None:
        self._interpret = interpret

    def __call__(
        self,
        q_NBHD: Array,
        keys: Array,
        values: Array | None,
        tiles: Tiles,
        spec: HeadSpec,
        biases: Biases,
    ) -> Array:
        if biases.distances is not None:  # they are gathered, which Pallas kernels cannot do
            return attend(q_NBHD, keys, values, tiles, spec, biases)
        pages = keys, values
        if q_NBHD.shape[1] > 1:
            return extend(q_NBHD, pages, tiles, spec, biases, interpret=self._interpret)
        found = decode(q_NBHD[:, 0], pages, tiles, spec, biases, interpret=self._interpret)
        return found[:, None]


def _attend(
    q_NKRD: Array,
    pages: tuple[Array, Array | None],
    tiles: Tiles,
    spec: HeadSpec,
    biases: Biases,
    interpret: bool,
) -> Array:
    keys, values = pages
    count, heads, rows, _ = q_NKRD.shape
    page_size, num_pages = keys.shape[2], tiles.tables.shape[1]
    repeated = (jnp.repeat(x, spec.group, axis=1)[..., None] for x in (tiles.places, tiles.ends))
    by_row = (
        _of_rows(biases.sinks, spec, rows, jnp.float32(_MASKED)),
        _of_rows(biases.slopes, spec, rows, jnp.float32(0)),
        _of_rows(biases.shifts, spec, rows, jnp.int32(0)),
    )
    index = _Index()
    page = pl.BlockSpec((1, 1, page_size, keys.shape[3]), index.page)
    in_specs = [pl.BlockSpec((1, 1, rows, spec.head_dim), index.tile), page]
    given = [q_NKRD, keys]
    if values is not None:
        in_specs.append(pl.BlockSpec((1, 1, page_size, values.shape[3]), index.page))
        given.append(values)
    in_specs += [pl.BlockSpec((1, rows, 1), index.row)] * 2
    in_specs += [pl.BlockSpec((1, rows, 1), index.head)] * len(by_row)
    kernel = functools.partial(_kernel, spec=spec, page_size=page_size)
    if values is None:
        kernel = _without_values(kernel)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count, heads, num_pages),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, 1, rows, spec.value_dim), index.tile),
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, spec.value_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((count, heads, rows, spec.value_dim), q_NKRD.dtype),
        interpret=interpret,
    )
    return call(tiles.tables, _spans(tiles, spec, page_size), *given, *repeated, *by_row)


class _Index:
    """Index maps: the block that each grid step reads, by tile n, key head k and page p."""

    def tile(self, n: Any, k: Any, p: Any, tables: Any, spans: Any) -> tuple[Any, ...]:
        """Rows of queries and results."""
        return n, k, 0, 0

    def page(self, n: Any, k: Any, p: Any, tables: Any, spans: Any) -> tuple[Any, ...]:
        """Pages beyond the visible ones repeat the last one, which is already loaded."""
        last = jnp.maximum(spans[n, 1] - 1, 0)
        return tables[n, jnp.clip(p, jnp.minimum(spans[n, 0], last), last)], k, 0, 0

    def row(self, n: Any, k: Any, p: Any, tables: Any, spans: Any) -> tuple[Any, ...]:
        """Positions of rows."""
        return n, 0, 0

    def head(self, n: Any, k: Any, p: Any, tables: Any, spans: Any) -> tuple[Any, ...]:
        """Biases of heads."""
        return k, 0, 0


def _without_values(kernel: Any) -> Any:
    def run(tables: Any, spans: Any, q_ref: Any, k_ref: Any, *rest: Any) -> None:
        kernel(tables, spans, q_ref, k_ref, None, *rest)

    return run


def _spans(tiles: Tiles, spec: HeadSpec, page_size: int) -> Array:
    """The first page that each tile sees, and the one after the last: int32 (N, 2)."""
    last = -(-tiles.ends.max(1) // page_size)
    first = jnp.zeros_like(last)
    own = jnp.where(tiles.ends > 0, tiles.places, jnp.iinfo(jnp.int32).max).min(1)
    if spec.window:
        first = jnp.maximum(own - spec.window + 1, 0) // page_size
    elif spec.chunk:
        first = own // spec.chunk * spec.chunk // page_size
    return jnp.stack((jnp.minimum(first, last), last), 1).astype(jnp.int32)


def _by_head(q_NBHD: Array, spec: HeadSpec) -> Array:
    """(N, K, B G, D): the rows of a key head, head by head within a row."""
    count, rows = q_NBHD.shape[:2]
    q = q_NBHD.reshape(count, rows, spec.num_kv_heads, spec.group, spec.head_dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(count, spec.num_kv_heads, -1, spec.head_dim)


def _rows(out_NKRV: Array, rows: int, spec: HeadSpec) -> Array:
    """The reverse, of results: (N, B, H, V)."""
    count = out_NKRV.shape[0]
    out = out_NKRV.reshape(count, spec.num_kv_heads, rows, spec.group, spec.value_dim)
    return out.transpose(0, 2, 1, 3, 4).reshape(count, rows, spec.num_heads, spec.value_dim)


def _of_rows(x_H: Array | None, spec: HeadSpec, rows: int, absent: Array) -> Array:
    """Numbers of heads for each row of a tile, of the type of `absent`: (K, R, 1)."""
    if x_H is None:
        return jnp.full((spec.num_kv_heads, rows, 1), absent)
    by_head = x_H.astype(absent.dtype).reshape(spec.num_kv_heads, 1, spec.group)
    shape = spec.num_kv_heads, rows // spec.group, spec.group
    return jnp.broadcast_to(by_head, shape).reshape(spec.num_kv_heads, rows, 1)
