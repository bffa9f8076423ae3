"""Packs the inputs of a step into one integer vector, for a single copy to the device.

Shapes: G KV groups, T rows, N tiles of B rows, P pages, S sampled rows, R requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from sylvan.kernels.native.opset import Source
from sylvan.kernels.xla.attention import Tiles
from sylvan.kernels.xla.values import PaddedInputs, StateRows
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.xla.sizes import StepBucket, StepSizes

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class InputKinds:
    """Static facts for a model's steps.

    Attributes:
        groups: KV groups.
        states: Slots of recurrent states; 0: the model has none.
        adapters: Whether rows may have adapters.
    """

    groups: int
    states: int = 0
    adapters: bool = False


def shapes_of(bucket: StepBucket, kinds: InputKinds) -> Shapes:
    """Shapes of a step's arrays, in their order in the vector."""
    tiles = bucket.tiles, bucket.tile_rows
    shapes: dict[str, tuple[int, ...]] = {
        "ids": (bucket.rows,),
        "positions": (bucket.rows,),
        "types": (bucket.rows,),
        "slots": (kinds.groups, bucket.rows),
        "tile_rows": tiles,
        "places": tiles,
        "ends": tiles,
        "tables": (kinds.groups, bucket.tiles, bucket.pages),
        "sample_rows": (bucket.samples,),
        "tokens": (1,),
    }
    if kinds.adapters:
        shapes["adapters"] = (bucket.rows,)
    if kinds.states:
        requests, rows = (bucket.requests,), (bucket.rows,)
        shapes |= {"starts": requests, "counts": requests, "state_slots": requests}
        shapes |= {"saves": (2, bucket.rows), "row_places": rows, "row_slots": rows}
    return shapes


def num_inputs(bucket: StepBucket, kinds: InputKinds) -> int:
    """Length of the vector."""
    return sum(int(np.prod(shape)) for shape in shapes_of(bucket, kinds).values())


def unpack(vector: jax.Array, bucket: StepBucket, kinds: InputKinds) -> PaddedInputs:
    """Split the vector into arrays, while JAX traces a step."""
    parts: dict[str, jax.Array] = {}
    start = 0
    for name, shape in shapes_of(bucket, kinds).items():
        stop = start + int(np.prod(shape))
        parts[name] = vector[start:stop].reshape(shape)
        start = stop
    rows = None if bucket.decodes else parts["tile_rows"]
    tiles = [
        Tiles(rows, parts["places"], parts["ends"], parts["tables"][group])
        for group in range(kinds.groups)
    ]
    sources = {
        Source.IDS: parts["ids"],
        Source.POSITIONS: parts["positions"],
        Source.TOKEN_TYPES: parts["types"],
    }
    states = None
    if kinds.states:
        states = StateRows(
            starts=parts["starts"],
            counts=parts["counts"],
            slots=parts["state_slots"],
            saves=parts["saves"],
            places=parts["row_places"],
            row_slots=parts["row_slots"],
            single=bucket.decodes,
        )
    return PaddedInputs(
        sources,
        parts["slots"],
        tiles,
        parts["sample_rows"],
        parts["tokens"][0],
        state_rows=states,
        adapters=parts.get("adapters"),
    )


def sizes_of(batch: ForwardBatch) -> StepSizes:
    """Sizes of a step, from its host arrays."""
    requests = batch.num_reqs
    longest = int(batch.host.kv_lens[:requests].max(initial=1))
    pages = -(-longest // batch.kv.page_size)
    return StepSizes(batch.num_tokens, requests, batch.num_samples, max(pages, 1))


def pack(
    batch: ForwardBatch,
    bucket: StepBucket,
    kinds: InputKinds,
    adapters: IntArray | None = None,
) -> IntArray:
    """Pack a step into a vector. Padding rows store to page 0 and attend to nothing.

    `adapters` are the slots of the step's rows, (T,).
    """
    host, tokens, requests = batch.host, batch.num_tokens, batch.num_reqs
    shapes = shapes_of(bucket, kinds)
    vector = np.zeros(num_inputs(bucket, kinds), np.int32)
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
    if kinds.adapters:
        parts["adapters"][:] = -1
        if adapters is not None:
            parts["adapters"][:tokens] = adapters
    if kinds.states:
        _pack_states(parts, batch, kinds.states)
    return vector


def _pack_states(parts: Mapping[str, IntArray], batch: ForwardBatch, none: int) -> None:
    """Which slots rows read and write; padding has `none`, which does not exist."""
    work, tokens, requests = batch.state_work, batch.num_tokens, batch.num_reqs
    assert work is not None, "a step without states"
    starts = batch.host.q_starts[: requests + 1]
    counts = np.diff(starts)
    for name in ("state_slots", "saves", "row_slots"):
        parts[name][:] = none
    parts["starts"][:requests], parts["counts"][:requests] = starts[:-1], counts
    parts["state_slots"][:requests] = work.slots
    parts["row_slots"][:tokens] = np.repeat(work.slots, counts)
    parts["row_places"][:tokens] = np.arange(tokens) - np.repeat(starts[:-1], counts)
    for request, rows, slot in work.saves:
        column = parts["saves"][:, starts[request] + rows - 1]
        free = np.flatnonzero(column == none)
        if not len(free):
            raise RuntimeError("more than two copies of the state after one row")
        column[free[0]] = slot


def _tiles(starts: IntArray, ends: IntArray, bucket: StepBucket) -> tuple[IntArray, IntArray]:
    """The request of each used tile, and the indices of its rows (N, B)."""
    size = bucket.tile_rows
    counts = -(-(ends - starts) // size)
    of_tile = np.repeat(np.arange(len(starts), dtype=np.int32), counts)
    first = np.cumsum(counts, dtype=np.int32) - counts
    number = np.arange(len(of_tile), dtype=np.int32) - first[of_tile]
    rows = (starts[of_tile] + number * size)[:, None] + np.arange(size, dtype=np.int32)
    return of_tile, rows
