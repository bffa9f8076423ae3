"""Packs the inputs of a step into one integer vector, for a single copy to the device.

Shapes: G KV groups, T rows, N tiles of B rows, P pages, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from sylvan.kernels.native.opset import Source
from sylvan.kernels.xla.attention import Tiles
from sylvan.kernels.xla.values import PaddedInputs
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.xla.sizes import StepBucket, StepSizes

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(bucket: StepBucket, groups: int) -> Shapes:
    """Shapes of a step's arrays, in their order in the vector."""
    tiles = bucket.tiles, bucket.tile_rows
    return {
        "ids": (bucket.rows,),
        "positions": (bucket.rows,),
        "types": (bucket.rows,),
        "slots": (groups, bucket.rows),
        "tile_rows": tiles,
        "places": tiles,
        "ends": tiles,
        "tables": (groups, bucket.tiles, bucket.pages),
        "sample_rows": (bucket.samples,),
        "tokens": (1,),
    }


def num_inputs(bucket: StepBucket, groups: int) -> int:
    """Length of the vector."""
    return sum(int(np.prod(shape)) for shape in shapes_of(bucket, groups).values())


def unpack(vector: jax.Array, bucket: StepBucket, groups: int) -> PaddedInputs:
    """Split the vector into arrays, while JAX traces a step."""
    parts: dict[str, jax.Array] = {}
    start = 0
    for name, shape in shapes_of(bucket, groups).items():
        stop = start + int(np.prod(shape))
        parts[name] = vector[start:stop].reshape(shape)
        start = stop
    rows = None if bucket.decodes else parts["tile_rows"]
    tiles = [
        Tiles(rows, parts["places"], parts["ends"], parts["tables"][group])
        for group in range(groups)
    ]
    sources = {
        Source.IDS: parts["ids"],
        Source.POSITIONS: parts["positions"],
        Source.TOKEN_TYPES: parts["types"],
    }
    return PaddedInputs(sources, parts["slots"], tiles, parts["sample_rows"], parts["tokens"][0])


def sizes_of(batch: ForwardBatch) -> StepSizes:
    """Sizes of a step, from its host arrays."""
    requests = batch.num_reqs
    longest = int(batch.host.kv_lens[:requests].max(initial=1))
    pages = -(-longest // batch.kv.page_size)
    return StepSizes(batch.num_tokens, requests, batch.num_samples, max(pages, 1))


def pack(batch: ForwardBatch, bucket: StepBucket) -> IntArray:
    """Pack a step into a vector. Padding rows store to page 0 and attend to nothing."""
    host, tokens, requests = batch.host, batch.num_tokens, batch.num_reqs
    groups = len(host.page_tables)
    shapes = shapes_of(bucket, groups)
    vector = np.zeros(num_inputs(bucket, groups), np.int32)
    parts: dict[str, IntArray] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + int(np.prod(shape))
        parts[name] = vector[start:stop].reshape(shape)
        start = stop
    parts["ids"][:tokens] = host.input_ids[:tokens]
    parts["positions"][:tokens] = host.positions[:tokens]
    parts["types"][:tokens] = host.token_types[:tokens]
    parts["slots"][:, :tokens] = host.slot_mappings[:, :tokens]
    parts["sample_rows"][: batch.num_samples] = host.sample_rows[: batch.num_samples]
    parts["tokens"][0] = tokens
    starts, ends = host.q_starts[:requests], host.q_starts[1 : requests + 1]
    of_tile, rows = _tiles(starts, ends, bucket)
    used = len(of_tile)
    there = rows < ends[of_tile, None]
    places = rows + (host.kv_lens[:requests] - ends)[of_tile, None]
    visible = places + 1
    if batch.row_ends is not None:
        later = batch.row_ends[np.minimum(rows, tokens - 1)]
        visible = np.maximum(visible, later)
    parts["tile_rows"][:] = bucket.rows
    parts["tile_rows"][:used] = np.where(there, rows, bucket.rows)
    parts["places"][:used] = np.where(there, places, 0)
    parts["ends"][:used] = np.where(there, visible, 0)
    tables = host.page_tables[:, host.req_slots[:requests][of_tile]]
    width = min(bucket.pages, tables.shape[2])
    parts["tables"][:, :used, :width] = tables[:, :, :width]
    return vector


def _tiles(starts: IntArray, ends: IntArray, bucket: StepBucket) -> tuple[IntArray, IntArray]:
    """The request of each used tile, and the indices of its rows (N, B)."""
    size = bucket.tile_rows
    counts = -(-(ends - starts) // size)
    of_tile = np.repeat(np.arange(len(starts), dtype=np.int32), counts)
    first = np.cumsum(counts, dtype=np.int32) - counts
    number = np.arange(len(of_tile), dtype=np.int32) - first[of_tile]
    rows = (starts[of_tile] + number * size)[:, None] + np.arange(size, dtype=np.int32)
    return of_tile, rows
