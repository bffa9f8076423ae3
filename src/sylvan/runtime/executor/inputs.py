"""Writes a plan into the arrays that a step's forward pass reads; numpy only.

Shapes: T rows of the step, R slices, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.graph_buckets import GraphBucket

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows, slices and samples of a step, and its padded size, if any."""

    tokens: int
    requests: int
    samples: int
    bucket: GraphBucket | None = None


def fill_step(
    arrays: Arrays,
    plan: StepPlan,
    tables: IntArray,
    page_size: int,
    bucket: GraphBucket | None = None,
    shifts: IntArray | None = None,
) -> Sizes:
    """Write ids, positions, slots and lengths; `tables` are the page tables (G, S, P).

    `shifts` (S,) are added to the rotary positions of each request slot.

    Ids of rows in flight stay as in the plan; the reader of `arrays` resolves them. Padding rows of
    a bucket write to page 0, belong to no request and attend to nothing.
    """
    lens = plan.stops - plan.starts
    tokens, requests, samples = plan.num_tokens, plan.num_slices, plan.num_samples
    ends = np.cumsum(lens, dtype=np.int32)
    arrays["q_starts"][0] = 0
    arrays["q_starts"][1 : requests + 1] = ends
    arrays["kv_lens"][:requests] = plan.stops
    arrays["req_slots"][:requests] = plan.slots
    rows = plan.sample_rows
    arrays["sample_rows"][:samples] = ends[plan.samples] - 1 if rows is None else rows
    arrays["input_ids"][:tokens] = plan.input_ids
    arrays["token_types"][:tokens] = 0 if plan.token_types is None else plan.token_types
    positions = np.arange(tokens, dtype=np.int32)
    positions -= np.repeat(ends - lens - plan.starts, lens)
    slots, (pages, offsets) = np.repeat(plan.slots, lens), np.divmod(positions, page_size)
    for table, mapping in zip(tables, arrays["slot_mappings"], strict=True):
        mapping[:tokens] = table[slots, pages] * page_size + offsets
    if plan.positions is not None:
        positions = plan.positions
    elif plan.drafts:
        positions = plan.row_positions()
    arrays["positions"][:tokens] = positions
    if shifts is not None and (shifts := shifts[plan.slots]).any():
        arrays["positions"][:tokens] += np.repeat(shifts, lens)
    sizes = Sizes(tokens, requests, samples, bucket)
    if bucket is not None:
        _pad(arrays, sizes, bucket)
    return sizes


def _pad(arrays: Arrays, sizes: Sizes, bucket: GraphBucket) -> None:
    for name in ("input_ids", "positions", "token_types", "slot_mappings"):
        arrays[name][..., sizes.tokens : bucket.rows] = 0
    some = slice(sizes.requests, bucket.requests)
    for name in ("kv_lens", "req_slots"):
        arrays[name][some] = 0
    # In a decode-only bucket each padding request has one padding row, in others none.
    ends = np.arange(some.start + 1, some.stop + 1) if bucket.decodes else sizes.tokens
    arrays["q_starts"][some.start + 1 : some.stop + 1] = ends
    arrays["sample_rows"][sizes.samples : bucket.requests] = 0
