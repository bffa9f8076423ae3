"""Where a request's time went: stages without gaps, which add up to its duration.

All processes of a server read the same monotonic clock, so times of the scheduler and of the
API process are comparable.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sylvan.protocol.messages import Timing
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState

StageName = Literal[
    "tokenize",
    "api_server_dispatch",
    "prefill_waiting",
    "prefill_forward",
    "decode_forward",
    "detokenize",
    "network",
]
"""In this order: the call is parsed, its prompt rendered and tokenised; sent to the scheduler;
queued (also for KV tiers, grammars, adapters); prefilled; decoded; the last
text is detokenised and returned; the client reads it."""

Process = Literal["api", "scheduler", "detokenizer"]

_NO_TIMING = Timing()


class RequestStage(msgspec.Struct, frozen=True, gc=False):
    """A stage between two times, in seconds of the monotonic clock."""

    name: StageName
    process: Process
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s


def began_s(live: LiveRequest) -> float:
    """Return when the call of a request arrived."""
    return live.origin.received_s or live.received_s or live.arrived_s


def stages(live: LiveRequest, sample: SampleState) -> list[RequestStage]:
    """Return the stages of a sample until its request was closed.

    Each starts where the one before ended. Stages that were not reached, for example by an aborted
    request, are left out; the last known stage then extends to the end.
    """
    if sample.stages is not None and live.closed_s:
        return sample.stages
    timing = sample.timing or _NO_TIMING
    end_s = sample.delivered_s or live.closed_s
    points: tuple[tuple[StageName, Process, float], ...] = (
        ("tokenize", "api", live.arrived_s),
        ("api_server_dispatch", "api", timing.received),
        ("prefill_waiting", "scheduler", timing.started),
        ("prefill_forward", "scheduler", timing.first_token),
        ("decode_forward", "scheduler", timing.finished),
        ("detokenize", "detokenizer", sample.last_s),
        ("network", "api", end_s),
    )
    found: list[RequestStage] = []
    at = began_s(live)
    for name, process, point_s in points:
        if not point_s:
            continue
        until = min(max(at, point_s), max(at, end_s))
        found.append(RequestStage(name, process, at, until))
        at = until
    sample.stages = found if live.closed_s else None
    return found
