"""Processes of children, before they know what they are to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from sylvan.config.env import for_compute

SCHEDULER = (sys.executable, "-m", "sylvan.runtime.engine.scheduler_process")
DETOKENIZER = (sys.executable, "-m", "sylvan.runtime.engine.detokenizer_process")


def start_process(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child that reads its orders from standard input."""
    # a session of its own: signals to the terminal's group are for the parent to deal with
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True, env=for_compute())


class EarlyScheduler:
    """A scheduler process that waits for its orders.

    It imports PyTorch meanwhile, which takes longer than all that must be known before it can have
    them: the configuration, and what this process imports itself.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = start_process(SCHEDULER)

    def take(self) -> subprocess.Popen[bytes] | None:
        """The process, once; whoever takes it ends it."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """End it; idempotent."""
        if (process := self.take()) is not None:
            process.kill()
            process.communicate()
