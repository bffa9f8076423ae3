"""The interface of an open device: streams, events, graphs and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from sylvan.runtime.platform.facts import PlatformFacts


class Event(Protocol):
    """A place in a stream."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> None:
        """Block until all work given to the stream before this event is done.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class PlatformStream(Protocol):
    """Work on the device, in the order given."""

    def run(self, work: Callable[[], None]) -> None:
        """Give work to the device; it is done at the latest when an event after it is waited for.

        `work` launches kernels and copies and must neither read a result nor wait for one.
        Memory that it reads on the host must stay as it is until then.
        """
        ...

    def event(self) -> Event:
        """Mark this place."""
        ...

    def after(self, event: Event) -> None:
        """Work given from now on begins once `event`, of another stream, is past; never blocks."""
        ...


class PlatformGraph(Protocol):
    """Kernel launches recorded once, over memory that stays where it is."""

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record what `work` launches; the tensor returned is filled by each replay."""
        ...

    def replay(self) -> None:
        """Launch it all again; inside `PlatformStream.run`."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device."""

    free: int
    total: int


class Platform(Protocol):
    """One device of a kind, in use by this process. `chip`: as compilers call it, like `sm_90`."""

    facts: PlatformFacts
    device: torch.device
    chip: str

    def memory(self) -> Memory:
        """Free memory now; memory that torch caches counts as used until `trim`."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Run `work` to completion; return the peak of additional bytes it held."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device reads and writes by itself."""
        ...

    def stream(self) -> PlatformStream:
        """The stream that this process's steps run on; one object for all callers."""
        ...

    def side_stream(self) -> PlatformStream:
        """A new stream, whose work runs beside that of the steps."""
        ...

    def graph(self) -> PlatformGraph | None:
        """A new graph, which shares memory with all others; None if there are none."""
        ...

    def unsynced(self) -> AbstractContextManager[None]:
        """While it is entered, a call that waits for the device raises RuntimeError."""
        ...

    def trim(self) -> None:
        """Return memory that torch caches to the device."""
        ...
