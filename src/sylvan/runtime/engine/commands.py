"""Executes executor commands: drain, run between steps, apply, resume."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sylvan.protocol.commands import (
    MEMORY_TAGS,
    CheckHealth,
    CommandResult,
    DescribeMemory,
    ExecutorCommand,
    JoinGroup,
    LeaveGroup,
    LoadAdapter,
    LoadWeights,
    ReleaseMemory,
    StartProfile,
    StopProfile,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import Finish
from sylvan.runtime.executor.api import Executor, PendingCommand
from sylvan.runtime.sched.scheduler import Scheduler

_ABORTED = Finish(type="abort", message="the weights were replaced", status=503)

_CONCURRENT = (
    LoadWeights,
    UnloadWeights,
    JoinGroup,
    LeaveGroup,
    DescribeMemory,
    CheckHealth,
    LoadAdapter,
    StartProfile,
    StopProfile,
)
"""Commands that do not affect steps: steps continue meanwhile."""


@dataclass(frozen=True, slots=True)
class _Running:
    number: int
    command: ExecutorCommand
    pending: PendingCommand


class Commands:
    """Runs commands one at a time; pauses the scheduler for those that change something.

    Args:
        scheduler: Paused and drained by the first command, resumed after the last.
        executor: Executes the commands.

    Attributes:
        blocked: Why no step may run after the last command; empty: steps may run.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._waiting: deque[tuple[int, ExecutorCommand]] = deque()
        self._running: _Running | None = None
        self.blocked = ""

    @property
    def active(self) -> bool:
        """Whether a command is pending."""
        return self._running is not None or bool(self._waiting)

    @property
    def stops_steps(self) -> bool:
        """Whether no step may be launched now."""
        return self._running is not None and not isinstance(self._running.command, _CONCURRENT)

    def add(self, number: int, command: ExecutorCommand) -> None:
        """Queue a command."""
        self._waiting.append((number, command))

    def poll(self) -> tuple[int, ExecutorCommand, CommandResult] | None:
        """Advance; return the number of a finished command, and its result."""
        if self._running is None:
            if not self._waiting:
                return None
            number, command = self._waiting.popleft()
            try:
                self._prepare(command)
            except CapacityError as error:
                return number, command, CommandResult(error=str(error), status=error.status)
            self._running = _Running(number, command, self._executor.control(command))
        if not self._running.pending.done():
            return None
        done, self._running = self._running, None
        result = done.pending.wait()
        self.blocked = result.blocked
        if not result.error and isinstance(done.command, UpdateWeights):
            self._take_effect(done.command)
        return done.number, done.command, result

    def _prepare(self, command: ExecutorCommand) -> None:
        """Drain, and release what the command invalidates."""
        if isinstance(command, _CONCURRENT):
            return
        self._scheduler.pause("in_place")
        flushes = isinstance(command, UpdateWeights) and command.flush
        releases = isinstance(command, ReleaseMemory) and "kv_cache" in (
            command.tags or MEMORY_TAGS
        )
        if (flushes or releases) and self._scheduler.holds_kv:
            raise CapacityError("KV is being loaded or transferred; try again when that is done")
        if releases:
            self._scheduler.forget_kv()

    def _take_effect(self, command: UpdateWeights) -> None:
        """Apply the command; outputs computed with the old weights have been emitted by now."""
        if command.abort:
            self._scheduler.abort_all(_ABORTED)
            self._scheduler.flush_outputs()
        if command.flush:
            self._scheduler.forget_kv()
