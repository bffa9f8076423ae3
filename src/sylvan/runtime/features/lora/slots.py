"""Which adapter is in which slot of the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

Eviction = Literal["lru", "fifo"]


class AdapterSlots:
    """Gives each adapter of a step a slot; others stay in theirs until it is wanted.

    Args:
        count: Slots, and so adapters in one step.
        eviction: Which adapter leaves its slot first: the one that was used longest ago, or the one
            that came first.
    """

    def __init__(self, count: int, eviction: Eviction) -> None:
        self.count = count
        self._eviction = eviction
        self._of: dict[str, int] = {}  # in the order in which they leave
        self._free = list(range(count - 1, -1, -1))

    @property
    def used(self) -> int:
        """Slots with an adapter."""
        return len(self._of)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._of

    def __getitem__(self, adapter: str) -> int:
        return self._of[adapter]

    def place(self, adapters: Iterable[str], kept: Collection[str]) -> Mapping[int, str]:
        """Have all of `adapters` in slots; returns the slots that changed, with their new ones.

        Args:
            adapters: Of one step; no more than there are slots, those of `kept` included.
            kept: They do not leave their slots.
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
