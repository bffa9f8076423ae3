"""Places prompts of similar length together, so that long ones do not delay short ones."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.worker import Worker
from sylvan.utils.clock import Clock

MAX_SAMPLES = 4096
ABS_THRESHOLD, REL_THRESHOLD = 64, 1.5


class BucketPolicy(RoutingPolicy):
    """Gives each worker a range of prompt lengths with an equal share of the recent tokens.

    The boundaries follow recent prompts. When loads differ too much, the least loaded worker takes
    the request whatever its length. Intended for prefill workers, whose time depends on length.
    """

    def __init__(self, clock: Clock, adjust_s: float, thresholds: tuple[int, float]) -> None:
        self._clock = clock
        self._adjust_s = adjust_s
        self._thresholds = thresholds
        self._lengths: deque[int] = deque(maxlen=MAX_SAMPLES)
        self._borders: list[int] = []
        self._adjusted_s = clock()

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        length = request.num_tokens
        self._lengths.append(length)
        now = self._clock()
        if len(self._borders) != len(workers) - 1 or now - self._adjusted_s >= self._adjust_s:
            self._adjusted_s = now
            self._borders = borders(sorted(self._lengths), len(workers))
        loads = [worker.weighted_load for worker in workers]
        gap, ratio = self._thresholds
        if max(loads) - min(loads) > gap and max(loads) > ratio * min(loads):
            return Placement(workers[loads.index(min(loads))], length, "balanced")
        ordered = sorted(workers, key=lambda worker: worker.id)
        return Placement(ordered[bisect_left(self._borders, length)], length, "bucket")


def borders(lengths: Sequence[int], num_buckets: int) -> list[int]:
    """Return the upper bounds of all buckets but the last, with about equal tokens per bucket.

    Args:
        lengths: Lengths of recent prompts, ascending.
        num_buckets: Number of buckets.
    """
    share = sum(lengths) / num_buckets
    found: list[int] = []
    total = 0
    for length in lengths:
        total += length
        while len(found) < num_buckets - 1 and total >= share * (len(found) + 1):
            found.append(length)
    return found + [lengths[-1] if lengths else 0] * (num_buckets - 1 - len(found))


def create(parts: PolicyParts) -> BucketPolicy:
    config = parts.config
    gap, ratio = config.balance_abs_threshold, config.balance_rel_threshold
    thresholds = (
        ABS_THRESHOLD if gap is None else gap,
        REL_THRESHOLD if ratio is None else ratio,
    )
    return BucketPolicy(parts.clock, config.bucket_adjust_s, thresholds)
