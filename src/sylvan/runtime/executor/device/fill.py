"""Writes a plan into the host copy of a step's inputs; numpy only.

Shapes: T rows of the step, R slices, N slices that sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.executor.graphs.sizes import Bucket
from sylvan.runtime.executor.plan import StepPlan
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingSlots
from sylvan.runtime.sampling.philox import uniform

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows, slices and samples of a step, and the bucket that it is padded to, if any."""

    tokens: int
    requests: int
    samples: int
    bucket: Bucket | None = None


def fill_step(
    arrays: Arrays, plan: StepPlan, table: IntArray, page_size: int, bucket: Bucket | None
) -> Sizes:
    """Ids, positions, slots and lengths.

    What a bucket adds writes to page 0, belongs to no request and attends to nothing.
    """
    lens = plan.stops - plan.starts
    tokens, requests = int(lens.sum()), plan.num_slices
    ends = np.cumsum(lens, dtype=np.int32)
    arrays["q_starts"][0] = 0
    arrays["q_starts"][1 : requests + 1] = ends
    arrays["kv_lens"][:requests] = plan.stops
    arrays["req_slots"][:requests] = plan.slots
    samples = len(plan.samples)
    arrays["sample_rows"][:samples] = ends[plan.samples] - 1
    arrays["input_ids"][:tokens] = plan.input_ids
    feed = arrays["feed"][:tokens]
    feed[:] = -1
    feed[plan.in_flight] = plan.in_flight_slots
    positions = arrays["positions"][:tokens]
    positions[:] = np.arange(tokens, dtype=np.int32)
    positions -= np.repeat(ends - lens - plan.starts, lens)
    pages = table[np.repeat(plan.slots, lens), positions // page_size]
    arrays["out_slots"][:tokens] = pages * page_size + positions % page_size
    sizes = Sizes(tokens, requests, samples, bucket)
    if bucket is not None:
        _pad(arrays, sizes, bucket)
    return sizes


def _pad(arrays: Arrays, sizes: Sizes, bucket: Bucket) -> None:
    for name in ("input_ids", "positions", "out_slots"):
        arrays[name][sizes.tokens : bucket.rows] = 0
    arrays["feed"][sizes.tokens : bucket.rows] = -1
    some = slice(sizes.requests, bucket.requests)
    for name in ("kv_lens", "req_slots"):
        arrays[name][some] = 0
    # A request of padding has a row of padding where all have one, else none.
    ends = np.arange(some.start + 1, some.stop + 1) if bucket.decodes else sizes.tokens
    arrays["q_starts"][some.start + 1 : some.stop + 1] = ends
    arrays["sample_rows"][sizes.samples : bucket.requests] = 0


def fill_sampling(
    arrays: Arrays, slots: IntArray, positions: np.ndarray, params: SamplingSlots
) -> None:
    """Parameters of the rows that sample; positions are those of the sampled tokens."""
    count = len(slots)
    for name in (
        "greedy",
        "temperature",
        "top_p",
        "min_p",
        "seed",
        "sample",
        "frequency",
        "presence",
        "repetition",
    ):
        arrays[name][:count] = getattr(params, name)[slots]
    arrays["top_k"][:count] = np.minimum(params.top_k[slots], NO_TOP_K)
    arrays["slots"][:count] = slots
    arrays["position"][:count] = positions


def fill_uniform(
    arrays: Arrays, slots: IntArray, positions: np.ndarray, params: SamplingSlots
) -> None:
    """Random numbers made on the host, for samplers that make none themselves."""
    count = len(slots)
    arrays["uniform"][:count] = uniform(params.seed[slots], params.sample[slots], positions)
