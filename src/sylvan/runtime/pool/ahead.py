"""Makes KV pages resident before steps write to them, while no step runs.

Memory that is written for the first time has to be mapped and zeroed by the system: a page of
0.8 MB takes 0.2 ms, and several where a virtual machine has to ask its host.
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
"""Of each KV group, beyond the pages that steps have used."""
SLICE_BYTES = 2 << 20  # at a time: a step that begins meanwhile shares the cores with one slice
REST_S = 0.25  # without a step before anything is done

Populate = Callable[[int, int], bool]


class PageRegions(Protocol):
    """What of `PageMemory` is needed."""

    num_pages: int
    page_bytes: int

    def regions(self, page: int) -> tuple[Region, ...]:
        """See `PageMemory`."""
        ...


class Steps(Protocol):
    """What the executor tells of its steps."""

    def begin(self, pages: IntArray) -> None:
        """A step begins, with these changes of page tables (`StepPlan.pages`)."""
        ...

    def end(self) -> None:
        """It is over."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """Pages of one KV group: those below `used` were in steps, those below `stop` are resident."""

    memory: PageRegions
    ahead: int
    used: int = 0
    stop: int = 0

    def advance(self, populate: Populate) -> bool | None:
        """One slice; whether the system did it. None: all that is wanted is resident."""
        used = self.used  # a step that begins now may change it
        start, wanted = max(self.stop, used), min(used + self.ahead, self.memory.num_pages)
        if start >= wanted:
            return None
        self.stop = stop = min(start + max(1, SLICE_BYTES // self.memory.page_bytes), wanted)
        regions = self.memory.regions(start)
        return all(populate(r.address, (stop - start) * r.stride) for r in regions)


class PagesAhead:
    """Implements `Steps`. Pages are given out in ascending order, until some are used again.

    So a bounded number beyond the highest that was used is what comes next. A thread, which sleeps
    while there is nothing to do, makes them resident slice by slice once no step has run for a
    moment; it begins with the first rest after `start`.

    Args:
        groups: Of the model; memory of the host.
        ahead_bytes: Of each group.
        rest_s: How long no step has run.
        populate: Makes memory resident: address and bytes; False ends all of this.
    """

    def __init__(
        self,
        groups: Sequence[PageRegions],
        ahead_bytes: int = AHEAD_BYTES,
        rest_s: float = REST_S,
        populate: Populate = make_resident,
        clock: Clock = monotonic,
    ) -> None:
        self._groups = [_Group(each, ahead_bytes // max(1, each.page_bytes)) for each in groups]
        self._has_bytes = any(each.page_bytes for each in groups)  # else pages are only counted
        self._rest_s, self._populate, self._clock = rest_s, populate, clock
        self._running, self._ended_s = False, clock()
        self._released = False
        self._wake, self._over = threading.Event(), threading.Event()
        self._slice = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sylvan-pages-ahead", daemon=True)

    def start(self) -> None:
        """Begin to look for rest."""
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
        """The memory is given back to the system: nothing is made resident from now on."""
        with self._slice:
            self._released = True

    def resume(self) -> None:
        """The memory may be used again, and none of it is resident."""
        with self._slice:
            self._released = False
            for group in self._groups:
                group.used = group.stop = 0
        self._wake.set()

    def close(self) -> None:
        """End the thread, before the memory goes."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        while not self._over.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._over.is_set() and self._advance():
                pass

    def _advance(self) -> bool:
        """Do one slice, or wait for rest; False: there is nothing to do."""
        rested_s = self._clock() - self._ended_s
        if self._running or rested_s < self._rest_s:
            self._over.wait(max(self._rest_s - rested_s, self._rest_s / 4))
            return True
        with self._slice:
            if self._released:
                return False
            for group in self._groups:
                done = group.advance(self._populate)
                if done is None:
                    continue
                if not done:
                    self._over.set()  # not on this system
                return True
            return False
