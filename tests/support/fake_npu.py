"""A fake of `torch_npu`: the published functions that a platform calls.

Streams run work at once, graphs keep the captured callable. Devices have no memory of their own:
`torch.device("npu")` exists, tensors on it do not.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

TOTAL = 64 << 30


class Event:
    """As `torch.npu.Event`."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False) -> None:
        self.recorded = None

    def record(self, stream=None) -> None:
        self.recorded = stream

    def query(self) -> bool:
        return self.recorded is not None

    def synchronize(self) -> None:
        assert self.recorded is not None, "an event that was never recorded"


class Stream:
    """As `torch.npu.Stream`."""

    def __init__(self, device=None, priority=0) -> None:
        self.device, self.waited = device, []

    def wait_event(self, event) -> None:
        self.waited.append(event)


class NPUGraph:
    """As `torch.npu.NPUGraph`."""

    def __init__(self) -> None:
        self.capturing, self.replayed = False, 0

    def replay(self) -> None:
        assert not self.capturing
        self.replayed += 1


class FakeNpu:
    """As the module `torch.npu`."""

    Stream, Event, NPUGraph = Stream, Event, NPUGraph

    def __init__(self) -> None:
        self.available, self.current, self.allocated, self.peak = True, None, 1 << 20, 0
        self.mode = 0

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 0

    def set_stream(self, stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, npu_graph, pool=None, stream=None):
        npu_graph.capturing = True
        yield
        npu_graph.capturing = False

    def graph_pool_handle(self):
        return 0, 1

    def mem_get_info(self, device=None):
        return TOTAL - self.allocated, TOTAL

    def memory_allocated(self, device=None) -> int:
        return self.allocated

    def max_memory_allocated(self, device=None) -> int:
        return max(self.peak, self.allocated)

    def reset_peak_memory_stats(self, device=None) -> None:
        self.peak = 0

    def empty_cache(self) -> None:
        self.allocated = 1 << 20

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="Ascend910B3", total_memory=TOTAL)

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode) -> None:
        self.mode = mode
