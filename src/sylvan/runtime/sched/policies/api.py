"""What a policy is and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sylvan.runtime.core.req import Req
from sylvan.utils.clock import Clock, monotonic

WINDOW = 128
"""Requests whose cached prefix is looked up in a step; later arrivals follow in order."""

SCAN = 1024
"""Requests that are tested for being worth a look-up in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyContext:
    """What policies may look at.

    `cached_tokens(req)` is how many tokens of a waiting request the prefix cache holds now.
    `likely_hits(reqs)` are those of them worth asking about, found by a cheap test.
    `tenant_weights` are shares for fair policies; 1 where not given. `inflight` steps are launched
    before the first of them is waited for.
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

        Mostly a few are read, so what comes later need not be worked out before.
        """
        ...


@runtime_checkable
class PacingPolicy(SchedulePolicy, Protocol):
    """One that also says how much of prompts a step computes beside requests that decode."""

    def prompt_tokens(self, running: Sequence[Req], priority: int) -> int:
        """Most prompt tokens that the next step may compute.

        Args:
            running: Requests that have memory.
            priority: The highest of those whose prompts lack; less urgent ones do not hold it up.
        """
        ...
