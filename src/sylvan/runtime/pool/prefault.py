"""Makes KV pages resident while no step runs, before steps write to them.

On first write the system must map and zero memory. For a page of 0.8 MB this takes 0.2 ms, and
several times as long in a virtual machine that must ask its host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sylvan.kernels.memory import make_resident
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.memory import Region
from sylvan.utils.clock import Clock, monotonic

AHEAD_BYTES = 128 << 20
"""Bytes per KV group beyond the pages that steps have used."""
SLICE_BYTES = 2 << 20  # per call: a step that starts meanwhile competes with one slice only
IDLE_S = 0.25  # idle time before the thread starts to work

Populate = Callable[[int, int], bool]


class PageRegions(Protocol):
    """The part of `PageMemory` that this module needs."""

    num_pages: int
    page_bytes: int

    def regions(self, page: int) -> tuple[Region, ...]:
        """See `PageMemory`."""
        ...


class StepListener(Protocol):
    """Notifications of the executor about its steps."""

    def begin(self, pages: IntArray) -> None:
        """A step starts, with these changes of page tables (`StepPlan.pages`)."""
        ...

    def end(self) -> None:
        """The step has finished."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """Pages of a KV group: steps have used those below `used`; those below `stop` are resident."""

    memory: PageRegions
    ahead: int
    used: int = 0
    stop: int = 0

    def advance(self, populate: Populate) -> bool | None:
        """Populate one slice; return whether the system did it. None: enough pages are resident."""
        used = self.used  # a step that starts now may change it
        start, wanted = max(self.stop, used), min(used + self.ahead, self.memory.num_pages)
        if start >= wanted:
            return None
        self.stop = stop = min(start + max(1, SLICE_BYTES // self.memory.page_bytes), wanted)
        regions = self.memory.regions(start)
        return all(populate(r.address, (stop - start) * r.stride) for r in regions)


class PagePrefaulter:
    """Implements `StepListener`: a thread that makes pages resident, slice by slice.

    Pages are allocated in ascending order until some are reused, so the next ones are those after
    the highest used page. The thread works when no step has run for `idle_s`, from `start` on, and
    sleeps otherwise.

    Args:
        groups: KV groups of the model, in host memory.
        ahead_bytes: Bytes per group to keep resident ahead.
        idle_s: Idle time before it starts to work.
        populate: Makes memory (address, bytes) resident; False: unsupported, the thread ends.
    """

    def __init__(
        self,
        groups: Sequence[PageRegions],
        ahead_bytes: int = AHEAD_BYTES,
        idle_s: float = IDLE_S,
        populate: Populate = make_resident,
        clock: Clock = monotonic,
    ) -> None:
        self._groups = [_Group(each, ahead_bytes // max(1, each.page_bytes)) for each in groups]
        self._has_bytes = any(each.page_bytes for each in groups)  # False: pages are only counted
        self._idle_s, self._populate, self._clock = idle_s, populate, clock
        self._running, self._ended_s = False, clock()
        self._released = False
        self._wake, self._over = threading.Event(), threading.Event()
        self._slice = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sylvan-pages-ahead", daemon=True)

    def start(self) -> None:
        """Start to watch for idle time."""
        if self._has_bytes:
            self._wake.set()
            self._thread.start()

    def begin(self, pages: IntArray) -> None:
        self._running = True
        if not pages.shape[1]:
            return
        for number, group in enumerate(self._groups):
            own = pages[3] if len(self._groups) == 1 else pages[3][pages[0] == number]
            most = int(own.max()) + 1 if own.size else 0
            if most > group.used:
                group.used = most
                self._wake.set()

    def end(self) -> None:
        self._running, self._ended_s = False, self._clock()

    def release(self) -> None:
        """Pause: the memory is returned to the system."""
        with self._slice:
            self._released = True

    def resume(self) -> None:
        """Resume: the memory may be used again, and none of it is resident."""
        with self._slice:
            self._released = False
            for group in self._groups:
                group.used = group.stop = 0
        self._wake.set()

    def close(self) -> None:
        """Stop the thread, before the memory is freed."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    # ---- runs in the thread

    def _run(self) -> None:
        while not self._over.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._over.is_set() and self._advance():
                pass

    def _advance(self) -> bool:
        """Populate one slice, or wait for idle time; False: there is nothing to do."""
        idled_s = self._clock() - self._ended_s
        if self._running or idled_s < self._idle_s:
            self._over.wait(max(self._idle_s - idled_s, self._idle_s / 4))
            return True
        with self._slice:
            if self._released:
                return False
            for group in self._groups:
                done = group.advance(self._populate)
                if done is None:
                    continue
                if not done:
                    self._over.set()  # unsupported by this system
                return True
            return False
