"""Fault injection for the disk and the clock: `--chaos`."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from random import Random

from sylvan.config.chaos import Faults
from sylvan.utils.clock import Clock

log = logging.getLogger(__name__)

JUMP_PERIOD_S = 5.0
_NO_LIMIT = 2**32 - 2  # database pages


class DiskFaults:
    """A slow disk that is full at random; thread-safe."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random = Random(faults.seed)

    def before_transaction(self, db: sqlite3.Connection) -> None:
        """Before a transaction: sleep, and decide whether the database may grow."""
        if self._faults.disk_delay_s:
            time.sleep(self._random.uniform(0, self._faults.disk_delay_s))
        full = self._random.random() < self._faults.disk_full
        if full:
            log.warning("chaos: the disk is full")
        db.execute(f"PRAGMA max_page_count={1 if full else _NO_LIMIT}")  # never below its size


class JumpingClock:
    """A wall clock with an error that changes every few seconds.

    Args:
        wall: The true wall clock.
        clock: Monotonic clock that decides when to jump.
    """

    def __init__(self, faults: Faults, wall: Callable[[], float], clock: Clock) -> None:
        self._jump_s = faults.clock_jump_s
        self._random = Random(faults.seed)
        self._wall = wall
        self._clock = clock
        self._until_s = clock()
        self._wrong_s = 0.0

    def __call__(self) -> float:
        """Return the seconds since the epoch, plus the current error."""
        now = self._clock()
        if now >= self._until_s:
            self._until_s = now + JUMP_PERIOD_S
            self._wrong_s = self._random.uniform(-self._jump_s, self._jump_s)
            log.warning("chaos: the clock is wrong by %.0f s", self._wrong_s)
        return self._wall() + self._wrong_s
