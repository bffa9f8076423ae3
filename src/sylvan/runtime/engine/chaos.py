"""Process fault injection: `--chaos`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from sylvan.config.chaos import Faults

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class Victim(Protocol):
    """A process that faults are injected into."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still exists."""
        ...


class ProcessFaults:
    """Kills and stops processes at random."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._random, self._delays = Random(faults.seed), Random(faults.seed)
        self._killed: set[str] = set()

    @property
    def delays(self) -> bool:
        """Whether to delay messages."""
        return self._faults.ipc_delay_s > 0

    def delay(self) -> float:
        """Return the delay of the next message, in seconds."""
        return self._delays.uniform(0, self._faults.ipc_delay_s)

    def was_injected(self, name: str) -> bool:
        """Whether the last death of a process was injected, and so is not its fault."""
        if name not in self._killed:
            return False
        self._killed.discard(name)
        return True

    async def run(self, victims: Callable[[], Mapping[str, Victim]]) -> None:
        """Inject faults until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for name, victim in victims().items():
                role = name.split("-")[0]
                chances = {
                    "scheduler": self._faults.kill_scheduler,
                    "detokenizer": self._faults.kill_detokenizer,
                }
                if self._random.random() < chances.get(role, 0.0):
                    logger.warning("chaos: killing the %s", name)
                    self._killed.add(name)
                    victim.signal(signal.SIGKILL)
                elif role == "scheduler" and self._random.random() < self._faults.stop_scheduler:
                    logger.warning("chaos: stopping the %s", name)
                    await self._stop(victim)

    async def _stop(self, victim: Victim) -> None:
        victim.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._faults.stop_s)
        finally:
            victim.signal(signal.SIGCONT)
