"""Buckets: the step sizes that device graphs are captured for."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BUCKET = 256
_MIXED_ROWS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_MIXED_REQUESTS = (8, 64)


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Maximum rows and requests of a captured graph; equal in a decode-only graph."""

    rows: int
    requests: int

    @property
    def decodes(self) -> bool:
        """Whether each request has one row."""
        return self.rows == self.requests


def decode_buckets(max_reqs: int) -> tuple[GraphBucket, ...]:
    """Batch sizes for decode graphs: each about a quarter larger, up to the largest batch."""
    most = min(max_reqs, MAX_BUCKET)
    sizes = [1, 2, 4, *range(8, 33, 4), *range(40, 65, 8), *range(80, 129, 16)]
    sizes += range(160, MAX_BUCKET + 1, 32)
    return tuple(
        GraphBucket(size, size) for size in sorted({s for s in sizes if s < most} | {most})
    )


def mixed_buckets(max_tokens: int, max_reqs: int) -> tuple[GraphBucket, ...]:
    """Sizes for graphs of steps with prompts.

    Larger steps gain nothing: launching kernels one by one takes less time than computing them.
    """
    requests = sorted({min(count, max_reqs) for count in (*_MIXED_REQUESTS, MAX_BUCKET)})
    rows = [count for count in _MIXED_ROWS if count <= max_tokens]
    return tuple(GraphBucket(r, q) for r in rows for q in requests if q < r)
