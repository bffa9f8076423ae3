"""The interface of an open device: streams, events, graphs and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from sylvan.runtime.platform.facts import PlatformFacts


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Block until all work queued before this event is done.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class PlatformStream(Protocol):
    """A queue of work on the device, done in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue work; it is done at the latest when a later event has been waited for.

        `work` launches kernels and copies; it must not read results or wait for them. Host memory
        that it reads must not change until it is done.
        """
        ...

    def event(self) -> Event:
        """Record an event after all work queued so far."""
        ...

    def after(self, event: Event) -> None:
        """Make later work of this stream wait for `event` of another stream; never blocks."""
        ...


class PlatformGraph(Protocol):
    """Kernel launches that are recorded once; the memory that they use must not move."""

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record the launches of `work`; each replay fills the returned tensor."""
        ...

    def replay(self) -> None:
        """Launch the recorded work again; call inside `PlatformStream.run`."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device, in bytes."""

    free: int
    total: int


class Platform(Protocol):
    """An open device. `chip`: the compilers' name of its architecture, such as `sm_90`."""

    facts: PlatformFacts
    device: torch.device
    chip: str

    def memory(self) -> Memory:
        """Free memory now; memory that torch caches counts as used until `trim`."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Run `work` to completion; return its peak memory use, in bytes."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed host memory that the device can access (pinned memory)."""
        ...

    def stream(self) -> PlatformStream:
        """The stream on which steps run; the same object for all callers."""
        ...

    def side_stream(self) -> PlatformStream:
        """Create a stream whose work runs concurrently with steps."""
        ...

    def graph(self) -> PlatformGraph | None:
        """Create a graph, which shares memory with all others; None: graphs are not supported."""
        ...

    def unsynced(self) -> AbstractContextManager[None]:
        """Context in which a call that waits for the device raises RuntimeError; for tests."""
        ...

    def trim(self) -> None:
        """Return memory that torch caches to the device."""
        ...
