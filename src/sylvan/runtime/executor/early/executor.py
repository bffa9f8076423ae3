"""Runs a saved step program without PyTorch, until a request needs the full executor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from sylvan.protocol.commands import CheckHealth, CommandResult, ExecutorCommand
from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.api import (
    Executor,
    ExecutorCaps,
    FinishedCommand,
    Pending,
    PendingCommand,
)
from sylvan.runtime.executor.early.needs import exceeds_program
from sylvan.runtime.executor.early.steps import FinishedStep, SavedSteps
from sylvan.runtime.executor.local import StepExecutor

logger = logging.getLogger(__name__)


class EarlyExecutor:
    """Implements `Executor` without PyTorch, whose import would double the time of a start.

    When a command or a request first needs PyTorch, the full executor is built in a thread, over
    the same memory, while the steps of other requests continue. It then runs all later steps.

    Args:
        caps: Facts for the scheduler, the same for both executors.
        steps: Runs the saved program.
        build: Builds the full executor, which continues with `steps.memory`.
        overlap: See `StepExecutor`.
    """

    def __init__(
        self,
        caps: ExecutorCaps,
        steps: SavedSteps,
        build: Callable[[], Executor],
        *,
        overlap: bool,
    ) -> None:
        self.caps = caps
        self._early = StepExecutor(steps, overlap=overlap)
        self._build = build
        self._thread = ThreadPoolExecutor(1, "sylvan-whole")  # starts when it is needed
        self._building: Future[Executor] | None = None
        self._whole: Executor | None = None
        self._last: Pending | None = None

    @property
    def whole(self) -> bool:
        """Whether every step can run now, without waiting."""
        return self._building is not None and self._building.done() and not self.failure

    @property
    def failure(self) -> str:
        """Why building the full executor failed; empty if it did not, or was not needed."""
        if self._building is None or not self._building.done():
            return ""
        error = self._building.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def prepare(self) -> None:
        """Start building the full executor unless that has begun; returns at once."""
        if self._building is None:
            logger.info("importing PyTorch: a request or a command needs it")
            self._building = self._thread.submit(self._build)
            self._building.add_done_callback(_log_failure)

    def launch(self, plan: StepPlan) -> Pending:
        if self._whole is None:
            if exceeds := exceeds_program(plan):
                self.prepare()
            if exceeds or self.whole:
                self._take_over()
            if exceeds and self._whole is None:
                why = f"PyTorch is needed but cannot be used: {self.failure}"
                return FinishedStep(None, ExecutorError(why))
        executor = self._early if self._whole is None else self._whole
        self._last = executor.launch(plan)
        return self._last

    def control(self, command: ExecutorCommand) -> PendingCommand:
        if self._building is None and isinstance(command, CheckHealth):
            return FinishedCommand(CommandResult({"healthy": True, "reason": ""}))
        self.prepare()
        assert self._building is not None
        return _LateCommand(self._building, command)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._early.close()
        if self.whole:
            assert self._building is not None
            self._building.result().close()

    def _take_over(self) -> None:
        """Wait for the full executor, which runs all later steps."""
        assert self._building is not None
        if self._last is not None:
            with contextlib.suppress(ExecutorError):  # the step's own `wait` raises it
                self._last.wait()
        if self._building.exception() is None:
            self._whole = self._building.result()
            self._early.close()


@dataclass(slots=True, eq=False)
class _LateCommand:
    """Implements `PendingCommand`: runs once the full executor is built."""

    building: Future[Executor]
    command: ExecutorCommand
    running: PendingCommand | None = None

    def done(self) -> bool:
        if not self.building.done():
            return False
        return self._start().done()

    def wait(self) -> CommandResult:
        return self._start().wait()

    def _start(self) -> PendingCommand:
        if self.running is None:
            error = self.building.exception()
            if error is None:
                self.running = self.building.result().control(self.command)
            else:
                self.running = FinishedCommand(CommandResult(error=str(error), status=500))
        return self.running


def _log_failure(building: Future[Executor]) -> None:
    if not building.cancelled() and (error := building.exception()) is not None:
        logger.error("PyTorch is needed but cannot be used", exc_info=error)
