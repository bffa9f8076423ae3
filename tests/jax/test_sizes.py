"""Buckets: every step fits into one, and which one it is."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.runtime.core.forward import BatchLimits
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBuckets, StepSizes


def limits(tokens=100, reqs=6, pages=64, **also):
    return BatchLimits(max_tokens=tokens, max_reqs=reqs, max_pages_per_req=pages, **also)


@pytest.mark.parametrize(
    "given",
    [
        limits(),
        limits(16, 16, 3),
        limits(512, 1, 2049),
        limits(20, 4, 17, max_samples=20),
        limits(8, 16, 4),
        limits(32, 32, 4, max_paths=5),
    ],
)
def test_every_step_within_the_limits_has_a_bucket(given):
    buckets = StepBuckets(given)
    rng = np.random.default_rng(2)
    most = given.max_reqs + given.max_paths
    for _ in range(300):
        requests = int(rng.integers(1, min(most, given.max_tokens) + 1))
        rows = int(rng.integers(requests, given.max_tokens + 1))
        samples = int(rng.integers(0, min(rows, given.max_sampled_rows) + 1))
        pages = int(rng.integers(1, given.max_pages_per_req + 1))
        bucket = buckets.of(StepSizes(rows, requests, samples, pages))

        assert bucket.rows >= rows
        assert bucket.samples >= samples
        assert bucket.pages >= pages
        tiles = requests if bucket.decodes else rows // bucket.tile_rows + requests
        assert bucket.tiles >= min(tiles, rows)
    assert len(buckets) <= 4 * (12 + 12)


def test_decoding_steps_take_the_next_power_of_two():
    buckets = StepBuckets(limits(reqs=24))

    sizes = [buckets.of(StepSizes(n, n, n, 1)).rows for n in (1, 2, 3, 5, 16, 17, 24)]

    assert sizes == [1, 2, 4, 8, 16, 24, 24]


def test_a_row_of_a_prompt_needs_a_bucket_of_prompts():
    buckets = StepBuckets(limits(reqs=4))
    step = StepSizes(3, 3, 3, 1)

    assert buckets.of(step).decodes
    assert not buckets.of(step, prompts=True).decodes


def test_steps_beyond_the_limits_are_refused():
    with pytest.raises(ValueError, match="no bucket"):
        StepBuckets(limits()).of(StepSizes(500, 1, 1, 1))


def test_waste_is_the_share_of_padding():
    use, buckets = BucketUse(), StepBuckets(limits(reqs=4))

    for rows in (3, 4):
        step = StepSizes(rows, rows, rows, 1)
        use.count(rows, buckets.of(step))

    assert (use.steps, use.rows, use.padded_rows, use.waste) == (2, 7, 8, 1 / 8)
    assert use.numbers()["waste"] == 0.125

    use.count(3, buckets.of(StepSizes(2, 2, 2, 1)), groups=2)  # two rows and one

    assert (use.rows, use.padded_rows) == (10, 12)
