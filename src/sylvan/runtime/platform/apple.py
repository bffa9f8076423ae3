"""Apple GPUs through `torch.mps`, which has one stream, events, and memory shared with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.accelerator import DeviceEvent
from sylvan.runtime.platform.api import Event, Memory, PlatformGraph, PlatformStream
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.utils.machine import inspect_machine


class MpsStream:
    """The only stream; the calling thread queues the work."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def run(self, work: Callable[[], None]) -> None:
        work()

    def event(self) -> Event:
        event = self._module.event.Event()
        event.record()
        return DeviceEvent(event)

    def after(self, event: Event) -> None:
        """Do nothing: there is one stream, which keeps the order."""


class MpsPlatform:
    """Implements `Platform` for the one GPU of a Mac."""

    def __init__(self, facts: PlatformFacts) -> None:
        """Open the device.

        Raises:
            ConfigError: torch cannot use it.
        """
        if not torch.backends.mps.is_available():
            raise ConfigError(
                f"device={facts.name}: torch {torch.__version__} cannot use the GPU of this Mac; "
                "update macOS (14 or newer) and torch, or choose device=cpu"
            )
        self.facts = facts
        self.device = torch.device("mps")
        self.chip = inspect_machine().cpu_name
        self._module: Any = torch.mps
        self._stream = MpsStream(self._module)

    def memory(self) -> Memory:
        """Size of the working set that Metal recommends, and the unused part of it."""
        total = int(self._module.recommended_max_memory())
        return Memory(max(0, total - int(self._module.driver_allocated_memory())), total)

    def peak(self, work: Callable[[], None]) -> int:
        """Growth of the driver's memory during `work`; the driver keeps freed memory."""
        self.trim()
        before = int(self._module.driver_allocated_memory())
        work()
        self._module.synchronize()
        return max(0, int(self._module.driver_allocated_memory()) - before)

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory, which the device shares."""
        return torch.zeros(size, dtype=dtype)

    def stream(self) -> PlatformStream:
        return self._stream

    def side_stream(self) -> PlatformStream:
        """Return the only stream."""
        return self._stream

    def graph(self) -> PlatformGraph | None:
        return None

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Do nothing: Metal cannot detect waits."""
        yield

    def trim(self) -> None:
        self._module.empty_cache()


def open_mps(facts: PlatformFacts) -> MpsPlatform:
    """Return the GPU of this Mac."""
    return MpsPlatform(facts)
