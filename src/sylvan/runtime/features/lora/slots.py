"""Which adapter is in which slot on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

Eviction = Literal["lru", "fifo"]


class AdapterSlots:
    """Assigns a slot to each adapter of a step; others keep theirs until it is needed.

    Args:
        count: Number of slots, and so of adapters in one step.
        eviction: Which adapter is evicted first: the least recently used (`lru`), or the first
            loaded (`fifo`).
    """

    def __init__(self, count: int, eviction: Eviction) -> None:
        self.count = count
        self._eviction = eviction
        self._of: dict[str, int] = {}  # in order of eviction
        self._free = list(range(count - 1, -1, -1))

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return len(self._of)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._of

    def __getitem__(self, adapter: str) -> int:
        return self._of[adapter]

    def place(self, adapters: Iterable[str], kept: Collection[str]) -> Mapping[int, str]:
        """Assign slots to all `adapters`; return the changed slots with their new adapters.

        Args:
            adapters: Of one step; together with `kept` at most as many as there are slots.
            kept: Adapters that must not be evicted.
        """
        wanted = dict.fromkeys(adapters)
        changed: dict[int, str] = {}
        for adapter in wanted:
            if adapter in self._of:
                if self._eviction == "lru":
                    self._of[adapter] = self._of.pop(adapter)
                continue
            if not self._free:
                self.remove(next(a for a in self._of if a not in wanted and a not in kept))
            slot = self._of[adapter] = self._free.pop()
            changed[slot] = adapter
        return changed

    def remove(self, adapter: str) -> None:
        """Free the slot of an adapter, if it has one."""
        if (slot := self._of.pop(adapter, None)) is not None:
            self._free.append(slot)
