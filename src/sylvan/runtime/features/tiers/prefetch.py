"""Decides what to fetch for waiting requests, and how long they wait."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.protocol.tiers import PrefetchWait
from sylvan.runtime.cache.types import ABSENT
from sylvan.runtime.features.tiers.keys import STATE, sibling, window_kind
from sylvan.runtime.features.tiers.tier import StorageTier
from sylvan.runtime.features.tiers.work import Fetched


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchPolicy:
    """How long a request waits for a fetch.

    Attributes:
        wait: `best_effort`: not at all, it uses what has arrived when it could start;
            `wait_complete`: until everything has arrived; `timeout`: a time that grows with tokens.
        min_tokens: Fewer tokens are recomputed.
        timeout_s: Fixed part of the `timeout`.
        timeout_per_ki_token_s: Additional time per 1024 tokens.
        longest_s: Upper bound, so that a hanging store blocks no request for longer.
    """

    wait: PrefetchWait = "timeout"
    min_tokens: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    longest_s: float = 30.0

    def budget_s(self, num_tokens: int) -> float:
        """Return how long to wait for this many tokens."""
        if self.wait == "best_effort":
            return 0.0
        if self.wait == "wait_complete":
            return self.longest_s
        wanted = self.timeout_s + self.timeout_per_ki_token_s * num_tokens / 1024
        return min(wanted, self.longest_s)


@dataclass(slots=True, eq=False)
class Prefetch:
    """The prefetch of one request.

    Attributes:
        job: Job of the fetch; 0: none, because another request fetches the same (`leader`), or it
            does not pay off.
        names: Names of the pages from `first` on.
        known: Pages of the prefix that were on the device at its start.
        until_s: When the request starts with whatever has arrived.
        late_s: When the fetch is abnormally late, and the request starts too.
        progress: Last report of the fetch.
        learnt: Pages of the prefix that the tree knows.
        restarts: Number of restarts.
    """

    began_s: float
    until_s: float
    late_s: float = float("inf")
    job: int = 0
    leader: str = ""
    first: int = 0
    known: int = 0
    names: tuple[str, ...] = ()
    progress: Fetched | None = None
    learnt: int = 0
    restarts: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive."""
        return not self.job or (self.progress is not None and self.progress.done)

    @property
    def arrived(self) -> int:
        """Pages of the prefix that can be loaded now, or are on the device."""
        return self.progress.arrived if self.progress is not None else 0


class ArrivedPages:
    """Implements `StoredPrefix` for the results of a fetch."""

    def __init__(self, tier: StorageTier, prefetch: Prefetch, progress: Fetched) -> None:
        self._tier, self._prefetch, self._progress = tier, prefetch, progress
        self.first, self.stop = prefetch.first, progress.arrived

    def page(self, page: int) -> int:
        return self._tier.take(self._name(page))

    def window(self, group: int, page: int) -> int:
        if page < self._progress.windows[group]:
            return ABSENT
        return self._tier.take(sibling(self._name(page), window_kind(group)))

    def state(self, stop: int) -> int:
        if not self._progress.state or stop != self._progress.arrived:
            return ABSENT
        return self._tier.take(sibling(self._name(stop - 1), STATE))

    def _name(self, page: int) -> str:
        return self._prefetch.names[page - self._prefetch.first]
