"""The features of a step that determine its duration.

The duration is a sum of: a constant; a piecewise linear, increasing function of the number of
rows, which fits both memory-bound small steps and compute-bound large ones; and terms
proportional to sampled rows, to the context of decodes, and to query-key pairs of
prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sylvan.runtime.core.step import StepPlan

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Numbers of rows at which the slope of the duration may change."""
SEGMENTS = len(KNOTS)
FEW = 16
"""Slices of a step up to which a plain loop is faster than arrays."""
NAMES = (
    "constant",
    *(f"row above {knot}" for knot in KNOTS),
    "sampled row",
    "decode context",
    "prompt pairs",
)
HOST_NAMES = ("constant", "slice", "start", "generated page")

Vector = NDArray[np.float64]


class PlanShape(NamedTuple):
    """A step plan as numbers.

    Attributes:
        rows: Number of tokens computed.
        slices: Number of requests.
        samples: Number of sampled rows.
        context: Total context of decoding rows, in tokens.
        pairs: Query-key pairs of prompts.
        starts: Number of requests that join.
    """

    rows: int
    slices: int
    samples: int
    context: int
    pairs: float
    starts: int

    @property
    def is_decode(self) -> bool:
        """Whether each request computes one token, as in most steps."""
        return self.rows == self.slices


def shape_of(plan: StepPlan) -> PlanShape:
    """Return the shape of a plan."""
    rows, slices = plan.num_tokens, plan.num_slices
    return shape(plan.numbers, rows, slices, plan.num_samples, len(plan.joins))


def shape(
    numbers: NDArray[np.int32], rows: int, slices: int, samples: int, starts: int
) -> PlanShape:
    """Compute the shape from the arrays of a plan; see `StepPlan`."""
    stops = numbers[2 * slices : 3 * slices]
    if rows == slices:
        return PlanShape(rows, slices, samples, int(stops.sum()), 0.0, starts)
    if slices <= FEW:
        return _shape_of_few(numbers[slices : 3 * slices].tolist(), rows, samples, starts)
    first = numbers[slices : 2 * slices].astype(np.int64)
    lens = stops - first
    single = lens == 1
    # a query at position p attends to p + 1 keys
    pairs = lens * (first + stops + 1) / 2
    context = int(stops[single].sum())
    return PlanShape(rows, slices, samples, context, float(pairs[~single].sum()), starts)


def _shape_of_few(ends: list[int], rows: int, samples: int, starts: int) -> PlanShape:
    """Compute it for few slices, without arrays, which have a high fixed cost."""
    slices, context, pairs = len(ends) // 2, 0, 0.0
    for first, stop in zip(ends[:slices], ends[slices:], strict=True):
        if stop - first == 1:
            context += stop
        else:
            pairs += (stop - first) * (first + stop + 1) / 2
    return PlanShape(rows, slices, samples, context, pairs, starts)


def step_features(found: PlanShape) -> list[float]:
    """Return the features in the order of `NAMES`."""
    return [
        1.0,
        *segments(found.rows),
        float(found.samples),
        float(found.context),
        found.pairs,
    ]


def segments(rows: int) -> list[float]:
    """Return the number of rows in each segment between `KNOTS`; the last segment is open."""
    found = [0.0] * SEGMENTS
    for place, low in enumerate(KNOTS):
        if rows <= low:
            break
        high = KNOTS[place + 1] if place + 1 < SEGMENTS else rows
        found[place] = float(min(rows, high) - low)
    return found
