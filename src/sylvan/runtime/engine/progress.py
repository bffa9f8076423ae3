"""How far loading a model has come, for people who wait."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sylvan.config.fields import size_text
from sylvan.protocol.messages import Loading
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

LOGGED_S = 2.0
TOLD_S = 0.1

Progress = Callable[[int, int], None]
"""Told of so many bytes of so many."""


class LoggedProgress:
    """Says how far loading is, now and then and at its end."""

    def __init__(self, quantization: str | None = None, clock: Clock = monotonic) -> None:
        self._what = f"loading weights as {quantization}" if quantization else "loading weights"
        self._clock = clock
        self._due_s = clock() + LOGGED_S

    def __call__(self, done: int, total: int) -> None:
        """See `Progress`."""
        if self._clock() >= self._due_s or done == total:
            self._due_s = self._clock() + LOGGED_S
            share = 100 * done // max(1, total)
            sizes = size_text(done), size_text(total)
            logger.info("%s: %s of %s (%d %%)", self._what, *sizes, share)


class ToldProgress:
    """Tells the parent process how far loading is, often enough for a bar that moves."""

    def __init__(self, tell: Callable[[Loading], None], clock: Clock = monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._due_s = clock()

    def __call__(self, done: int, total: int) -> None:
        """See `Progress`."""
        if self._clock() >= self._due_s or done == total:
            self._due_s = self._clock() + TOLD_S
            self._tell(Loading(done=done, total=total))
