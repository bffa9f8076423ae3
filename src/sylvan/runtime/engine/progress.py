"""Progress reports while a model loads."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sylvan.config.fields import size_text
from sylvan.protocol.messages import Loading
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 2.0
REPORT_INTERVAL_S = 0.1

Progress = Callable[[int, int], None]
"""Called with the loaded and the total bytes."""


class LoggedProgress:
    """Logs progress at intervals, and the end."""

    def __init__(self, quantization: str | None = None, clock: Clock = monotonic) -> None:
        self._what = f"loading weights as {quantization}" if quantization else "loading weights"
        self._clock = clock
        self._due_s = clock() + LOG_INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        if self._clock() >= self._due_s or done == total:
            self._due_s = self._clock() + LOG_INTERVAL_S
            share = 100 * done // max(1, total)
            sizes = size_text(done), size_text(total)
            logger.info("%s: %s of %s (%d %%)", self._what, *sizes, share)


class ReportedProgress:
    """Sends progress to the parent process, often enough for a smooth progress bar."""

    def __init__(self, send: Callable[[Loading], None], clock: Clock = monotonic) -> None:
        self._send = send
        self._clock = clock
        self._due_s = clock()

    def __call__(self, done: int, total: int) -> None:
        if self._clock() >= self._due_s or done == total:
            self._due_s = self._clock() + REPORT_INTERVAL_S
            self._send(Loading(done=done, total=total))
