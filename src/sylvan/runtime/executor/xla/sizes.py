"""Step sizes that functions are compiled for, and statistics of their use; imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from sylvan.runtime.core.forward import BatchLimits

TILE_ROWS = 16
"""Rows of one request that attention computes together, in steps with prompts."""
_FEW_REQUESTS = 4
_MIN_ROWS, _MIN_PAGES = 16, 8
_PAGE_LEVELS = 4


@dataclass(frozen=True, slots=True, order=True)
class StepBucket:
    """The sizes that a step is padded to.

    Attributes:
        rows: Token rows.
        requests: Requests; equal to `rows` if each request has one row.
        samples: Rows with logits.
        pages: Pages of the longest request.
    """

    rows: int
    requests: int
    samples: int
    pages: int

    @property
    def decodes(self) -> bool:
        """Whether each request has one row."""
        return self.rows == self.requests

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return 1 if self.decodes else TILE_ROWS

    @property
    def tiles(self) -> int:
        """Number of tiles that suffices for any division of rows among requests."""
        return self.rows if self.decodes else self.rows // TILE_ROWS + self.requests


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step: `requests` counts those with at least one row."""

    rows: int
    requests: int
    samples: int
    pages: int


class StepBuckets:
    """All buckets of an executor; finds the smallest one that a step fits into.

    From bucket to bucket, rows of decoding steps double, and rows of steps with prompts and pages
    grow fourfold. This bounds padding to these factors and keeps the number of functions small.
    """

    def __init__(self, limits: BatchLimits) -> None:
        requests = limits.max_reqs + limits.max_paths
        self._all = sorted(
            StepBucket(rows, count, samples, pages)
            for pages in _levels(limits.max_pages_per_req, _MIN_PAGES, _PAGE_LEVELS)
            for rows, count, samples in _shapes(limits, requests)
        )

    def __iter__(self) -> Iterator[StepBucket]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, step: StepSizes, *, prompts: bool = False) -> StepBucket:
        """The bucket with the fewest rows, then the fewest requests and pages.

        `prompts`: a bucket of steps with prompts, whatever the sizes are.

        Raises:
            ValueError: the step is larger than the limits.
        """
        for bucket in self._all:
            each_one = step.rows == step.requests == step.samples
            if bucket.decodes and (prompts or not each_one):
                continue
            if all(getattr(bucket, f.name) >= getattr(step, f.name) for f in fields(StepSizes)):
                return bucket
        raise ValueError(f"no bucket for {step}")


def _shapes(limits: BatchLimits, requests: int) -> Iterator[tuple[int, int, int]]:
    """Yield rows, requests and samples of the buckets, which each number of pages combines with."""
    decodes = min(requests, limits.max_tokens)
    for rows in _doubling(decodes):
        yield rows, rows, rows
    few = min(_FEW_REQUESTS, requests)
    top = -(-limits.max_tokens // TILE_ROWS) * TILE_ROWS
    for size in _levels(top, _MIN_ROWS, 6):
        rows = -(-size // TILE_ROWS) * TILE_ROWS
        kinds = {(few, few), (requests, max(limits.max_sampled_rows, requests))}
        for count, samples in kinds:
            # equal numbers would mean one row per request
            yield rows if rows != count else rows + TILE_ROWS, count, samples


def _doubling(last: int) -> list[int]:
    found = [1]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return found


def _levels(top: int, bottom: int, count: int) -> list[int]:
    """`top`, a quarter of it and so on: at most `count` levels, none below `bottom`."""
    found = [top]
    while len(found) < count and -(-found[-1] // 4) >= bottom:
        found.append(-(-found[-1] // 4))
    return found


@dataclass(slots=True)
class BucketUse:
    """Statistics of bucket padding since the start.

    Attributes:
        steps: Computed steps.
        rows: Their token rows.
        padded_rows: Rows of their buckets.
        compiled: Functions compiled before the first step.
        recompiled: Functions that XLA compiled during steps; must stay 0.
    """

    steps: int = 0
    rows: int = 0
    padded_rows: int = 0
    compiled: int = 0
    recompiled: int = 0

    def count(self, rows: int, bucket: StepBucket, groups: int = 1) -> None:
        """Count a step that each group of devices padded to `bucket`."""
        self.steps += 1
        self.rows += rows
        self.padded_rows += groups * bucket.rows

    def numbers(self) -> Mapping[str, float]:
        """All statistics, for display."""
        counts = {name.name: getattr(self, name.name) for name in fields(self)}
        return counts | {"waste": round(self.waste, 4)}

    @property
    def waste(self) -> float:
        """Share of the computed rows that were padding."""
        return 1 - self.rows / self.padded_rows if self.padded_rows else 0.0
