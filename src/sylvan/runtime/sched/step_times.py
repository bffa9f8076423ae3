"""Measures when steps run, and when none runs although there is work."""

from __future__ import annotations

from sylvan.protocol.steps import StepLog
from sylvan.runtime.core.req import Batch
from sylvan.runtime.sched.phases import RequestTable
from sylvan.utils.clock import Clock


class StepTimes:
    """Splits wall time into forward, bubble and idle seconds.

    A bubble is the time between the end of a step and the launch of the next one while requests are
    present: planning, emitting, receiving. With overlap, it is the time the device waits for the
    scheduler.

    Attributes:
        log: The last steps.
        forward_s: Seconds in which at least one step was in flight.
        bubble_s: Seconds of bubbles.
        idle_s: Seconds without work.
        prompt_tokens: Prompt tokens that steps computed.
        last_s: Duration of the last step, from its launch or from the end of the step before; 0
          before the first step.
    """

    def __init__(self, clock: Clock, requests: RequestTable) -> None:
        self.log = StepLog()
        self.forward_s = self.bubble_s = self.idle_s = 0.0
        self.prompt_tokens = 0
        self.last_s = 0.0
        self._clock, self._requests = clock, requests
        self._since_s: float | None = None  # start of the current period; None: there is none
        self._waits = False  # requests are present, and no step is in flight
        self._planned_s = self._computing_since_s = 0.0
        self._under_way: list[int] = []  # numbers of steps in flight; 0: without slices
        self._computing = 0  # steps in flight that have slices

    def planning(self) -> None:
        """Called when planning a step starts."""
        self._planned_s = self._clock()
        if self._since_s is None:
            self._since_s = self._planned_s

    def launching(self, batch: Batch, retractions: int) -> None:
        """Called before a step is launched."""
        slices, decodes = batch.slices, batch.num_decodes
        size = len(slices)
        if not size:
            self._under_way.append(0)
            return
        now = self._clock()
        if not self._computing:
            self._close_idle_period(now)
            self._computing_since_s = now
        self._computing += 1
        prompt_tokens, tokens, drafted = 0, decodes, 0
        if size > decodes:  # skip the sum otherwise: this runs in every step
            for piece in slices[decodes:]:
                length = piece.stop - piece.start
                tokens += length
                if piece.start < piece.req.prompt_len:
                    prompt_tokens += length
                if piece.draft is not None:
                    drafted += len(piece.draft.tokens)
            self.prompt_tokens += prompt_tokens
        running, waiting = len(self._requests.running), len(self._requests.waiting)
        counts = (size, decodes, prompt_tokens, tokens, running, waiting, retractions, drafted)
        number = self.log.launched(self._planned_s, now, counts, slices[0].req.rid.encode())
        self._under_way.append(number)

    def completed(self, *, failed: bool = False) -> float:
        """Called when the oldest step completed or failed; return the time."""
        now = self._clock()
        number = self._under_way.pop(0)
        if number:
            self.log.completed(number, now, failed=failed)
            self.last_s, self._computing_since_s = now - self._computing_since_s, now
            self._computing -= 1
            if not self._computing:
                self.forward_s += now - (now if self._since_s is None else self._since_s)
                self._since_s, self._waits = now, True
        return now

    def nothing_to_do(self) -> None:
        """Called when no request is present: the time after it is idle time."""
        if self._waits:
            self._close_idle_period(self._clock())
            self._waits = False

    def _close_idle_period(self, now_s: float) -> None:
        """Close a period without steps."""
        seconds = now_s - (now_s if self._since_s is None else self._since_s)
        if self._waits:
            self.bubble_s += seconds
        else:
            self.idle_s += seconds
        self._since_s = now_s
