"""What is read from the store for requests that wait, and how long they wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.protocol.tiers import PrefetchWait
from sylvan.runtime.cache.types import ABSENT
from sylvan.runtime.features.tiers.data import Fetched
from sylvan.runtime.features.tiers.keys import STATE, sibling, window_kind
from sylvan.runtime.features.tiers.tier import StorageTier


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchPolicy:
    """How long a request waits for what the store has of its prompt.

    Attributes:
        wait: `best_effort`: not at all, what has arrived when it could start is used;
            `wait_complete`: until all is there; `timeout`: for a time that grows with the tokens.
        min_tokens: Fewer are computed.
        timeout_s: Of `timeout`, for any number of tokens.
        timeout_per_ki_token_s: And for each 1024 of them.
        longest_s: However much is on its way; storage that hangs holds nobody up for longer.
    """

    wait: PrefetchWait = "timeout"
    min_tokens: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    longest_s: float = 30.0

    def budget_s(self, num_tokens: int) -> float:
        """How long to wait for so many tokens."""
        if self.wait == "best_effort":
            return 0.0
        if self.wait == "wait_complete":
            return self.longest_s
        wanted = self.timeout_s + self.timeout_per_ki_token_s * num_tokens / 1024
        return min(wanted, self.longest_s)


@dataclass(slots=True, eq=False)
class Prefetch:
    """Of one request.

    Attributes:
        job: Of the fetch; 0: there is none, another request fetches the same (`leader`), or it is
            not worth it.
        names: Of the pages from `first` on.
        known: Pages of the prefix that were on the device when it began.
        until_s: When the request starts, whatever has arrived.
        late_s: When the fetch is later than can be explained, and the request starts, too.
        progress: The newest that is known of the fetch.
        learnt: Pages of the prefix that the tree knows of.
        restarts: How often it was begun anew.
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
    """Implements `Stored` for what a fetch has found."""

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
