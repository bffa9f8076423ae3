"""The interface of scheduling policies, and the state they may read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sylvan.runtime.core.req import Req
from sylvan.utils.clock import Clock, monotonic

WINDOW = 128
"""Most requests per step whose cached prefix is looked up; later arrivals follow in order."""

SCAN = 1024
"""Most requests per step that are tested for a likely hit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyContext:
    """State that policies may read.

    `cached_tokens(req)` counts the tokens of a waiting request that the prefix cache holds now.
    `likely_hits(reqs)` filters requests by a cheap test before that lookup. `tenant_weights` are
    shares for fair policies; 1 where not given. `inflight` is the most steps launched without a
    result.
    """

    cached_tokens: Callable[[Req], int]
    likely_hits: Callable[[Iterable[Req]], Iterable[Req]] = lambda reqs: reqs
    clock: Clock = monotonic
    seed: int = 0
    inflight: int = 1
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])


class SchedulePolicy(Protocol):
    """Ranks waiting requests of equal priority."""

    def order(self, waiting: Sequence[Req]) -> Iterable[Req]:
        """Return the same requests, most urgent first; `waiting` is in arrival order.

        The scheduler usually reads only the first few, so order lazily.
        """
        ...


@runtime_checkable
class PacingPolicy(SchedulePolicy, Protocol):
    """A policy that also limits the prompt tokens of steps in which requests decode."""

    def prompt_tokens(self, running: Sequence[Req], priority: int) -> int:
        """Return the most prompt tokens that the next step may compute.

        Args:
            running: Requests that have memory.
            priority: The highest priority with a pending prompt; requests of lower priority do not
                limit it.
        """
        ...
