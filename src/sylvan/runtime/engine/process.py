"""Command lines and start of child processes; imports little, to start one early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from sylvan.config.env import for_compute

_CHILD = (sys.executable, "-m", "sylvan.runtime.engine.child")
SCHEDULER_ARGV = (*_CHILD, "sylvan.runtime.engine.scheduler_process")
RANK_ARGV = (*_CHILD, "sylvan.runtime.engine.rank_process")
_LOADS_TORCH = "sylvan.runtime.engine.build"
DETOKENIZER_ARGV = (*_CHILD, "sylvan.runtime.engine.detokenizer_process")


def start_process(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that reads its configuration from standard input."""
    # in its own session: the parent handles signals to the terminal's group
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True, env=environment)


class PrewarmedScheduler:
    """A scheduler process started before its configuration is known.

    It imports PyTorch meanwhile, which takes longer than reading the configuration and this
    process's own imports.

    Args:
        early: It may start without PyTorch, and imports it only if that is not possible.
    """

    def __init__(self, *, early: bool = False) -> None:
        argv = SCHEDULER_ARGV if early else (*SCHEDULER_ARGV, _LOADS_TORCH)
        self._process: subprocess.Popen[bytes] | None = start_process(argv, for_compute())

    def take(self) -> subprocess.Popen[bytes] | None:
        """Take ownership of the process, once."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """Kill the process unless it was taken; idempotent."""
        if (process := self.take()) is not None:
            process.kill()
            process.communicate()
