"""A fake of Intel's bridge to Gaudi: the published functions that a platform calls.

It reproduces the differences from `torch.cuda`. Streams run work at once. Devices have no memory of
their own.
"""

from __future__ import annotations

import contextlib

TOTAL = 96 << 30


class Event:
    """As `torch.hpu.Event`."""

    def __init__(self, enable_timing=False) -> None:
        self.recorded = None

    def record(self, stream=None) -> None:
        self.recorded = stream

    def query(self) -> bool:
        return self.recorded is not None

    def synchronize(self) -> None:
        assert self.recorded is not None, "an event that was never recorded"


class Stream:
    """As `torch.hpu.Stream`."""

    def __init__(self, device=None, priority=0, **kwargs) -> None:
        self.device, self.waited = device, []

    def wait_event(self, event) -> None:
        self.waited.append(event)


class FakeHpu:
    """As the module `torch.hpu` in eager mode: no graphs, no `empty_cache`."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.available, self.current, self.allocated, self.peak = True, None, 1 << 20, 0

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device=None) -> str:
        return "GAUDI2"

    def get_device_properties(self, device=None) -> str:
        return "(sramBaseAddress=1, dramSize=102106132480)"

    def set_stream(self, stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def mem_get_info(self, device=None):
        return TOTAL - self.allocated, TOTAL

    def memory_allocated(self, device=None) -> int:
        return self.allocated

    def max_memory_allocated(self, device=None) -> int:
        return max(self.peak, self.allocated)

    def reset_peak_memory_stats(self, device=None) -> None:
        self.peak = 0

    def set_sync_debug_mode(self, debug_mode) -> None:
        raise AssertionError("here it switches asynchronous streams off")
