"""Packs the inputs of a step into one int32 vector, for a single copy to the devices.

Each group of devices with its own requests gets a vector.

Shapes: G KV groups, T rows, N tiles of B rows, P pages, S sampled rows, R requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sylvan.kernels.native.opset import Source
from sylvan.kernels.xla.attention import Tiles
from sylvan.kernels.xla.values import PaddedInputs, StateRows
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.xla.pool import split_pages
from sylvan.runtime.executor.xla.sizes import StepBucket, StepSizes

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class InputKinds:
    """Which inputs the steps of a model have.

    Attributes:
        groups: KV groups.
        states: Slots of recurrent states; 0 if the model has none.
        adapters: Whether rows may have adapters.
        items: Whether rows attend to encoded items.
        shards: Groups of devices with different requests.
    """

    groups: int
    states: int = 0
    adapters: bool = False
    items: bool = False
    shards: int = 1


def shapes_of(bucket: StepBucket, kinds: InputKinds) -> Shapes:
    """Shapes of a step's arrays, in the order of the vector."""
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
    if kinds.items:
        shapes |= {"items": (bucket.tiles,), "item_ends": tiles}
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
    items = None
    if kinds.items:
        seen = parts["item_ends"]
        items = Tiles(rows, jnp.zeros_like(seen), seen, parts["items"][:, None])
    return PaddedInputs(
        sources,
        parts["slots"],
        tiles,
        parts["sample_rows"],
        parts["tokens"][0],
        state_rows=states,
        adapters=parts.get("adapters"),
        items=items,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRows:
    """The part of a step that one group of devices computes, in the order of the step.

    Attributes:
        group: Number of the group.
        rows: Indices of its rows in the step (T,).
        requests: Indices of its requests in the step (R,).
        samples: Indices of its sampled rows among those of the step (S,).
        starts: First row of each request among `rows` (R,).
        ends: Row after the last (R,).
    """

    group: int
    rows: IntArray
    requests: IntArray
    samples: IntArray
    starts: IntArray
    ends: IntArray

    @property
    def decodes(self) -> bool:
        """Whether each request has one row, which is sampled."""
        return len(self.rows) == len(self.requests) == len(self.samples)


def divide(batch: ForwardBatch, groups: int) -> list[GroupRows]:
    """Divide a step among groups of devices: a request belongs to the group with its pages."""
    host, requests = batch.host, batch.num_reqs
    counts = np.diff(host.q_starts[: requests + 1])
    if groups == 1:
        owners = np.zeros(requests, np.int32)
    else:
        newest = (host.kv_lens[:requests] - 1) // batch.kv.page_size
        numbers = host.page_tables[0, host.req_slots[:requests], newest]
        owners = split_pages(numbers, 1 + _pages_each(batch, groups)[0])[0]
    of_row = np.repeat(owners, counts)
    of_sample = of_row[host.sample_rows[: batch.num_samples]]
    return [
        _of_group(group, counts, [np.flatnonzero(x == group) for x in (of_row, owners, of_sample)])
        for group in range(groups)
    ]


def _pages_each(batch: ForwardBatch, groups: int) -> list[int]:
    """Pages per group of devices, page 0 not counted, by KV group."""
    return [(memory.num_pages - 1) // groups for memory in batch.kv.groups]


def _of_group(group: int, counts: IntArray, numbers: Sequence[Any]) -> GroupRows:
    rows, requests, samples = (found.astype(np.int32) for found in numbers)
    ends = np.cumsum(counts[requests], dtype=np.int32)
    return GroupRows(
        group=group,
        rows=rows,
        requests=requests,
        samples=samples,
        starts=ends - counts[requests],
        ends=ends,
    )


def sizes_of(batch: ForwardBatch, groups: Sequence[GroupRows]) -> StepSizes:
    """The largest sizes of any group's part, for one bucket that fits all."""
    longest = int(batch.host.kv_lens[: batch.num_reqs].max(initial=1))
    return StepSizes(
        rows=max(len(part.rows) for part in groups),
        requests=max(len(part.requests) for part in groups),
        samples=max(len(part.samples) for part in groups),
        pages=max(-(-longest // batch.kv.page_size), 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """Inputs of rows besides tokens, which some models have.

    Attributes:
        adapters: Adapter slot of each row of the step (T,).
        items: Encoded item that each row attends to, and how many vectors it has, (2, T).
    """

    adapters: IntArray | None = None
    items: IntArray | None = None


def pack(
    batch: ForwardBatch,
    bucket: StepBucket,
    kinds: InputKinds,
    part: GroupRows,
    also: RowInputs,
) -> IntArray:
    """Pack the part of a group into a vector.

    Padding rows store to page 0 and attend to nothing.
    """
    host, tokens = batch.host, len(part.rows)
    shapes = shapes_of(bucket, kinds)
    vector = np.zeros(num_inputs(bucket, kinds), np.int32)
    parts: dict[str, IntArray] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + int(np.prod(shape))
        parts[name] = vector[start:stop].reshape(shape)
        start = stop
    parts["ids"][:tokens] = host.input_ids[part.rows]
    parts["positions"][:tokens] = host.positions[part.rows]
    parts["types"][:tokens] = host.token_types[part.rows]
    firsts = _first_pages(batch, part, kinds)
    parts["slots"][:, :tokens] = _local(
        host.slot_mappings[:, part.rows], firsts[:, None] * batch.kv.page_size
    )
    sampled = host.sample_rows[part.samples]
    parts["sample_rows"][: len(sampled)] = np.searchsorted(part.rows, sampled)
    parts["tokens"][0] = tokens
    _pack_tiles(parts, batch, bucket, part, (firsts, also.items))
    if kinds.adapters:
        parts["adapters"][:] = -1
        if also.adapters is not None:
            parts["adapters"][:tokens] = also.adapters[part.rows]
    if kinds.states:
        _pack_states(parts, batch, kinds.states)
    return vector


def _pack_tiles(
    parts: Mapping[str, IntArray],
    batch: ForwardBatch,
    bucket: StepBucket,
    part: GroupRows,
    given: tuple[IntArray, IntArray | None],
) -> None:
    """Pack rows, positions and pages of tiles; `given`: first pages by KV group, items of rows."""
    host, (firsts, items_T) = batch.host, given
    of_tile, rows = _tiles(part.starts, part.ends, bucket)
    used = len(of_tile)
    there = rows < part.ends[of_tile, None]
    places = rows + (host.kv_lens[part.requests] - part.ends)[of_tile, None]
    visible = places + 1
    inside = np.minimum(rows, max(len(part.rows) - 1, 0))
    if batch.row_ends is not None:
        visible = np.maximum(visible, batch.row_ends[part.rows[inside]])
    parts["tile_rows"][:] = bucket.rows
    parts["tile_rows"][:used] = np.where(there, rows, bucket.rows)
    parts["places"][:used] = np.where(there, places, 0)
    parts["ends"][:used] = np.where(there, visible, 0)
    tables = host.page_tables[:, host.req_slots[part.requests][of_tile]]
    width = min(bucket.pages, tables.shape[2])
    parts["tables"][:, :used, :width] = _local(tables[:, :, :width], firsts[:, None, None])
    if items_T is not None:
        items = items_T[:, part.rows[inside]]  # (2, tiles, rows of a tile)
        parts["items"][:used] = np.where(there, items[0], 0).max(1)
        parts["item_ends"][:used] = np.where(there, items[1], 0)


def _first_pages(batch: ForwardBatch, part: GroupRows, kinds: InputKinds) -> IntArray:
    """Return by how much the plan's page numbers exceed the device group's own, by KV group."""
    if not part.group:
        return np.zeros(kinds.groups, np.int32)
    return np.array(_pages_each(batch, kinds.shards), np.int32) * part.group


def _local(numbers: IntArray, firsts: IntArray) -> IntArray:
    """Return page numbers within a group of devices; page 0 stays page 0."""
    return np.where(numbers > firsts, numbers - firsts, 0)


def _pack_states(parts: Mapping[str, IntArray], batch: ForwardBatch, none: int) -> None:
    """Pack the slots that rows read and write; padding gets `none`, which is out of range."""
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
