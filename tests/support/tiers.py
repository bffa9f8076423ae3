"""An in-memory tier that can be slow, out of order, full or lossy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sylvan.runtime.cache.types import ABSENT, Load, Locator, Node, PageLoad, Place


@dataclass
class Device:
    """Contents of each token slot of each paged group, and of each state slot."""

    groups: list[np.ndarray]  # (pages, page_size)
    states: dict[int, int] = field(default_factory=dict)


@dataclass
class Transfer:
    """A running write: (number of the tier, source, and place) for each page."""

    number: int
    pages: list[tuple[int, int, int]]  # (tier's number, group, source)
    state: tuple[int, int] | None  # (tier's number, source)
    source: Place
    done: bool = False


class ScriptedTier:
    """Stores pages under numbers, which are reused after a drop."""

    def __init__(self, place: Place, device: Device, above: ScriptedTier | None, room: int) -> None:
        self.whole_prefixes, self.is_open = False, True
        self.place, self.device, self.above, self.room = place, device, above, room
        self.held: dict[int, object] = {}  # by number; None until it is written
        self.transfers: list[Transfer] = []
        self.ended: list[tuple[int, bool]] = []
        self.refuses = False
        self._free: list[int] = []
        self._given = 0

    # ---- Tier

    @property
    def free_pages(self) -> int:
        return self.room - len(self.held)

    def wants(self, node: Node) -> bool:
        return True

    def offer(self, number: int, node: Node, source: Place) -> Locator | None:
        count = -(-len(node.tokens) // self.device.groups[0].shape[1])
        if self.refuses or count > self.free_pages:
            return None
        if source is Place.DEVICE:
            pages, state = node.pages, node.parts.state or ABSENT
            windows = [np.where(w == 0, ABSENT, w) for w in node.parts.windows]
        else:
            at = node.parts.lower[source]
            pages, windows, state = at.pages, at.windows, at.state
        transfer = Transfer(number, [], None, source)
        found = [self._take(transfer, 0, pages)]
        for group, own in enumerate(windows, 1):
            found.append(self._take(transfer, group, own))
        kept = ABSENT
        if state != ABSENT and self.free_pages > 0:
            kept = self._number()
            transfer.state = kept, state
        self.transfers.append(transfer)
        return Locator(found[0], tuple(found[1:]), kept)

    def poll(self) -> list[tuple[int, bool]]:
        ended, self.ended = self.ended, []
        return ended

    def drop(self, locator: Locator) -> None:
        numbers = [n for at in (locator.pages, *locator.windows) for n in at.tolist()]
        for number in (*numbers, locator.state):
            if number != ABSENT:
                del self.held[number]  # once only
                self._free.append(number)

    # ---- the script

    def move(self, which: int) -> None:
        """Let one transfer read its source now; later, the source may belong to another request."""
        waiting = [transfer for transfer in self.transfers if not transfer.done]
        if not waiting:
            return
        transfer = waiting[which % len(waiting)]
        for number, group, source in transfer.pages:
            self.held[number] = self._page(transfer.source, group, source)
        if transfer.state is not None:
            number, source = transfer.state
            self.held[number] = self._state(transfer.source, source)
        transfer.done = True

    def report(self, which: int, *, succeeded: bool) -> None:
        """End one transfer."""
        ready = [transfer for transfer in self.transfers if transfer.done or not succeeded]
        if ready:
            transfer = ready[which % len(ready)]
            self.transfers.remove(transfer)
            self.ended.append((transfer.number, succeeded))

    def read(self, part: PageLoad) -> None:
        """Fill the targets of a load."""
        for source, target in zip(part.sources.tolist(), part.targets.tolist(), strict=True):
            assert source in self.held, "a load reads what was dropped"
            self.device.groups[part.group][target] = self.held[source]

    def _page(self, place: Place, group: int, source: int) -> object:
        if place is Place.DEVICE:
            return self.device.groups[group][source].copy()
        return self.above.held.get(source, np.full(self.device.groups[0].shape[1], -7))

    def _state(self, place: Place, source: int) -> object:
        return self.device.states[source] if place is Place.DEVICE else self.above.held.get(source)

    def _take(self, transfer: Transfer, group: int, sources: np.ndarray) -> np.ndarray:
        numbers = np.full(len(sources), ABSENT, np.int64)
        for index, source in enumerate(sources.tolist()):
            if source != ABSENT and self.free_pages > 0:
                numbers[index] = number = self._number()
                transfer.pages.append((number, group, source))
        return numbers

    def _number(self) -> int:
        if self._free:
            number = self._free.pop(0)
        else:
            number, self._given = self._given, self._given + 1
        self.held[number] = None
        return number


def run_load(load: Load, tiers: dict[Place, ScriptedTier], device: Device) -> None:
    """Copy everything that a load brings."""
    for part in load.pages:
        tiers[part.place].read(part)
    if load.state is not None:
        held = tiers[load.state.place].held
        assert load.state.source in held, "a load reads what was dropped"
        device.states[load.state.target] = held[load.state.source]
