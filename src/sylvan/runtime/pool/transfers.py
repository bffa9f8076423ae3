"""Runs transfers concurrently with steps: in a thread, or on a separate stream of a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.kernels.memory import allocate
from sylvan.runtime.core.memory import Checksums, Transfer
from sylvan.runtime.platform.api import Event, Platform, PlatformStream

Work = Callable[[], None]
Hashing = Callable[[], Checksums]


class ChecksumError(RuntimeError):
    """The bytes of a page differ from those that were exported."""


class Transfers(Protocol):
    """Starts transfers, and allocates the host memory they use."""

    def start(
        self,
        num_bytes: int,
        work: Work,
        *,
        check: Work | None = None,
        hashes: Hashing | None = None,
    ) -> Transfer:
        """Begin to copy.

        Args:
            num_bytes: Size of the transfer, for `Transfer.num_bytes`.
            work: Copies the bytes, or launches a copy.
            check: Called before `work`; raises ChecksumError to fail the transfer.
            hashes: Computes checksums, after the bytes have arrived.
        """
        ...

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate host memory that transfers can use."""
        ...

    def suits(self, buffer: torch.Tensor) -> bool:
        """Whether transfers can read and write this host memory."""
        ...


class HostTransfers:
    """Copies within host memory: one thread, which sleeps when idle.

    It is not one of the threads that run kernels, so a concurrent step keeps all of its threads.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sylvan-copy")  # started with its first work

    def start(
        self,
        num_bytes: int,
        work: Work,
        *,
        check: Work | None = None,
        hashes: Hashing | None = None,
    ) -> Transfer:
        def run() -> Checksums | None:
            if check is not None:
                check()
            work()
            return hashes() if hashes is not None else None

        return ThreadedTransfer(num_bytes, self._thread.submit(run))

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate memory, which becomes resident when written."""
        return allocate(num_bytes)

    def suits(self, buffer: torch.Tensor) -> bool:
        return buffer.device.type == "cpu"


class DeviceTransfers:
    """Copies between a device and the host, on a separate stream.

    A copy starts after all work queued on the steps' stream so far, and runs concurrently with
    later work. Only checksums need a thread, which hashes bytes in the background.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._steps = platform.stream()
        self._stream = platform.side_stream()
        self._thread = ThreadPoolExecutor(1, "sylvan-checksums")

    def start(
        self,
        num_bytes: int,
        work: Work,
        *,
        check: Work | None = None,
        hashes: Hashing | None = None,
    ) -> Transfer:
        written = self._steps.event()
        if check is None and hashes is None:
            return StreamTransfer(num_bytes, self._launch(work, written), work)
        event = self._launch(work, written) if check is None else None

        def run() -> Checksums | None:
            if check is not None:
                check()
            (event or self._launch(work, written)).wait()
            return hashes() if hashes is not None else None

        return ThreadedTransfer(num_bytes, self._thread.submit(run))

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate pinned memory."""
        return self._platform.pinned(num_bytes, torch.uint8).numpy()

    def suits(self, buffer: torch.Tensor) -> bool:
        return self._platform.device.type == "cpu" or buffer.is_pinned()

    def _launch(self, work: Work, written: Event) -> Event:
        return launch_after(self._stream, written, work)


def launch_after(stream: PlatformStream, event: Event, work: Work) -> Event:
    """Queue work on `stream` after `event` of another stream; return an event for its end."""

    def run() -> None:
        with torch.inference_mode():
            work()

    stream.after(event)
    stream.run(run)
    return stream.event()


class ThreadedTransfer:
    """Implements `Transfer` by a thread."""

    def __init__(self, num_bytes: int, future: Future[Checksums | None]) -> None:
        self.num_bytes = num_bytes
        self._future = future

    @property
    def error(self) -> str | None:
        failed = self._future.exception() if self._future.done() else None
        return None if failed is None else str(failed)

    @property
    def checksums(self) -> Checksums | None:
        return self._future.result() if self.done() and self.error is None else None

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.exception()


class StreamTransfer:
    """Implements `Transfer` by a stream."""

    checksums = None

    def __init__(self, num_bytes: int, event: Event, work: Work) -> None:
        """`work` has been launched; it is kept until done, because it references the memory."""
        self.num_bytes = num_bytes
        self.error: str | None = None
        self._running: tuple[Event, Work] | None = event, work

    def done(self) -> bool:
        return self._finished(lambda event: event.done())

    def wait(self) -> None:
        def waited(event: Event) -> bool:
            event.wait()
            return True

        self._finished(waited)

    def _finished(self, ask: Callable[[Event], bool]) -> bool:
        """Whether it has finished; raises the device's error if it failed."""
        if self._running is None:
            return True
        try:
            over = ask(self._running[0])
        except RuntimeError as error:
            self.error, over = str(error), True
        if over:
            self._running = None
        return over
