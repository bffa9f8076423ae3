"""The CPU as a platform: work is done at once, so every event has passed."""

from __future__ import annotations

import platform as host
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sylvan.runtime.platform.api import Event, Memory, PlatformGraph, PlatformStream
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.utils.machine import inspect_machine


class CompletedEvent:
    """An event of `InlineStream`, which has always passed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class InlineStream:
    """Runs work at once."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def event(self) -> Event:
        return CompletedEvent()

    def after(self, event: Event) -> None:
        event.wait()


class HostPlatform:
    """Implements `Platform` without a device, to test and try the device path on a CPU."""

    def __init__(self, facts: PlatformFacts) -> None:
        self.facts = facts
        self.device = torch.device("cpu")
        self.chip = host.machine()
        self._stream = InlineStream()

    def memory(self) -> Memory:
        machine = inspect_machine()
        return Memory(machine.available_bytes, machine.total_bytes)

    def peak(self, work: Callable[[], None]) -> int:
        """Return 0: the CPU's allocator does not count."""
        work()
        return 0

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def stream(self) -> PlatformStream:
        return self._stream

    def side_stream(self) -> PlatformStream:
        return InlineStream()

    def graph(self) -> PlatformGraph | None:
        return None

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Do nothing: no call waits on a CPU."""
        yield

    def trim(self) -> None:
        pass


def open_host(facts: PlatformFacts) -> HostPlatform:
    """Return the CPU as a platform."""
    return HostPlatform(facts)
