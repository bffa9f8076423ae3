"""Command lines and start of child processes; imports little, so that one can be started early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from sylvan.config.env import for_compute

_CHILD = (sys.executable, "-m", "sylvan.runtime.engine.child")
SCHEDULER_ARGV = (*_CHILD, "sylvan.runtime.engine.scheduler_process")
RANK_ARGV = (*_CHILD, "sylvan.runtime.engine.rank_process")
DETOKENIZER_ARGV = (*_CHILD, "sylvan.runtime.engine.detokenizer_process")


def start_process(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that reads its configuration from standard input."""
    # in a session of its own: signals to the terminal's group are for the parent to handle
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True, env=environment)


class PrewarmedScheduler:
    """A scheduler process that is started before its configuration is known.

    It imports PyTorch in the meantime, which takes longer than reading the configuration and the
    imports of this process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = start_process(SCHEDULER_ARGV, for_compute())

    def take(self) -> subprocess.Popen[bytes] | None:
        """The process, once; the caller ends it."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """End the process unless it was taken; idempotent."""
        if (process := self.take()) is not None:
            process.kill()
            process.communicate()
