"""Detects a blocked event loop, and names the function that blocks it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from sys import _current_frames
from types import CodeType, FrameType

from sylvan.utils.clock import Clock, monotonic, process_cpu

DEFAULT_LIMIT_S = 0.25
MAX_DEPTH = 200
"""Maximum number of stack frames to examine."""
_BEATS_PER_LIMIT = 2
_PACKAGE = "sylvan."
_RUNNERS = ("asyncio.", "uvloop.", "selectors", "sylvan.cli.", "sylvan.utils.loop_watch")
"""Modules on top of the stack of a loop that is idle."""


@dataclass(frozen=True, slots=True)
class LoopStall:
    """One period in which the event loop was blocked.

    Attributes:
        seconds: Duration.
        function: The innermost function of this package in most samples of the stack.
        inner: The function of another package that it was calling; empty: none.
    """

    seconds: float
    function: str
    inner: str = ""

    def __str__(self) -> str:
        inside = f", in {self.inner}" if self.inner else ""
        return f"the event loop was blocked for {self.seconds:.2f} s by {self.function}{inside}"


class LoopWatch:
    """Watches one event loop.

    The loop records the time at short intervals. While it is late, another thread samples the stack
    of the loop's thread; this costs nothing while the loop is on time. C code that holds the GIL is
    reported as the Python function that called it.

    Args:
        limit_s: Delay after which the loop counts as blocked.
        on_stall: Called in the watching thread after each stall.
        clock: For durations.
        cpu: Processor time of this process; distinguishes a suspended process from a busy one.
    """

    def __init__(
        self,
        limit_s: float,
        on_stall: Callable[[LoopStall], None],
        clock: Clock = monotonic,
        cpu: Clock = process_cpu,
    ) -> None:
        self._limit_s = limit_s
        self._period_s = limit_s / _BEATS_PER_LIMIT
        self._on_stall = on_stall
        self._clock = clock
        self._cpu = cpu
        self._beat_s = 0.0
        self._ended = threading.Event()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start watching; call this once, in the thread of the loop."""
        watched = threading.get_ident()
        self._beat(loop)
        threading.Thread(
            target=self._watch, args=(watched,), name="loop-watch", daemon=True
        ).start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat_s = self._clock()
        if not self._ended.is_set():
            loop.call_later(self._period_s, self._beat, loop)

    def _watch(self, thread: int) -> None:
        seen: Counter[tuple[str, str]] = Counter()
        stalled_since_s = 0.0
        looked_s, spent_s = self._clock(), self._cpu()
        while not self._ended.wait(self._period_s):
            beat_s = self._beat_s
            passed_s, used_s = self._clock() - looked_s, self._cpu() - spent_s
            looked_s, spent_s = looked_s + passed_s, spent_s + used_s
            if passed_s > self._limit_s + self._period_s and used_s < passed_s / 2:
                seen.clear()  # this thread did not run either: the process was suspended
                continue
            if seen and beat_s != stalled_since_s:
                (function, inner), _ = seen.most_common(1)[0]
                seen.clear()
                self._on_stall(LoopStall(beat_s - stalled_since_s, function, inner))
            if self._clock() - beat_s > self._limit_s + self._period_s:
                place = _place(_current_frames().get(thread))
                if place is not None:  # None: the loop is idle, so the process was suspended
                    stalled_since_s = beat_s
                    seen[place] += 1


def _place(frame: FrameType | None) -> tuple[str, str] | None:
    """The innermost function of this package, and what it calls; None if the loop is idle."""
    inner: str | None = None
    for _ in range(MAX_DEPTH):
        if frame is None:
            break
        module = str(frame.f_globals.get("__name__", "?"))
        if inner is None and module.startswith(_RUNNERS):
            return None
        name = _name(module, frame.f_code)
        inner = inner or name
        if module.startswith(_PACKAGE):
            return name, "" if inner == name else inner
        frame = frame.f_back
    return None if inner is None else (inner, "")


def _name(module: str, code: CodeType) -> str:
    return f"{module}.{code.co_qualname}"
