"""A fake of `torch.mps`: the published functions that a platform calls."""

from __future__ import annotations

from types import SimpleNamespace

TOTAL = 12 << 30


class Event:
    """As `torch.mps.event.Event`."""

    def __init__(self, enable_timing=False) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded, "an event that was never recorded"


class FakeMps:
    """As the module `torch.mps`."""

    event = SimpleNamespace(Event=Event)

    def recommended_max_memory(self) -> int:
        return TOTAL

    def driver_allocated_memory(self) -> int:
        return 1 << 20

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass
