"""Executors of this process: steps run on the scheduler's thread, or on a separate one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.executor.api import ExecutorCaps, Pending, PendingCommand


class CommandExecutor(Protocol):
    """The part of `ExecutorControl` that executors call."""

    def run(self, command: ExecutorCommand) -> CommandResult:
        """Run a command between steps."""
        ...

    def close(self) -> None:
        """Free resources held by commands."""
        ...


class PlanWorker(Protocol):
    """Runs plans: a `StepWorker`, a `StageWorker`, or `SavedSteps`."""

    def launch(self, plan: StepPlan) -> Pending:
        """Compute a step."""
        ...

    def close(self) -> None:
        """End threads, and the worker halves of capabilities."""
        ...


class StepExecutor:
    """Runs steps on one worker whose backend is immediate.

    With `overlap`, steps run in their own thread, one after another. Without, a step runs when it
    is waited for, so that the outputs of the step before are emitted first.
    """

    def __init__(self, worker: PlanWorker, *, overlap: bool) -> None:
        self._worker = worker
        self._waiting: deque[_Lazy] = deque()
        self._thread = ThreadPoolExecutor(1, "sylvan-step") if overlap else None

    def launch(self, plan: StepPlan) -> Pending:
        """See `Executor.launch`."""
        if self._thread is not None:
            return _Threaded(self._thread.submit(self._worker.launch, plan))
        step = _Lazy(self._worker, plan, self._waiting)
        self._waiting.append(step)
        return step

    def close(self) -> None:
        """End the thread, and the worker."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.close()


class LocalExecutor(StepExecutor):
    """Runs steps, and commands between them."""

    def __init__(
        self, worker: PlanWorker, caps: ExecutorCaps, control: CommandExecutor, *, overlap: bool
    ) -> None:
        super().__init__(worker, overlap=overlap)
        self.caps = caps
        self._commands = _Commands(control)

    def control(self, command: ExecutorCommand) -> PendingCommand:
        return self._commands.start(command)

    def close(self) -> None:
        self._commands.close()
        super().close()


class DeviceExecutor:
    """Runs one worker whose backend queues work: `launch` does not wait for the device."""

    def __init__(self, worker: PlanWorker, caps: ExecutorCaps, control: CommandExecutor) -> None:
        self.caps = caps
        self._worker = worker
        self._commands = _Commands(control)

    def launch(self, plan: StepPlan) -> Pending:
        return self._worker.launch(plan)

    def control(self, command: ExecutorCommand) -> PendingCommand:
        return self._commands.start(command)

    def close(self) -> None:
        """Do nothing: the device's memory is freed with the process."""
        self._commands.close()
        self._worker.close()


class _Commands:
    """Runs one command at a time in a thread, so that the scheduler's thread is not blocked."""

    def __init__(self, control: CommandExecutor) -> None:
        self._control = control
        self._thread = ThreadPoolExecutor(1, "sylvan-control")  # starts with the first command

    def start(self, command: ExecutorCommand) -> PendingCommand:
        return _Command(self._thread.submit(self._control.run, command))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._control.close()


class _Command:
    """Implements `PendingCommand`."""

    def __init__(self, future: Future[CommandResult]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> CommandResult:
        return self._future.result()


class _Threaded:
    """A step that runs in the executor's thread."""

    def __init__(self, future: Future[Pending]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> StepResult:
        return self._future.result().wait()


class _Lazy:
    """A step that runs when it is waited for, after all steps launched before it."""

    def __init__(self, worker: PlanWorker, plan: StepPlan, waiting: deque[_Lazy]) -> None:
        self._worker, self._plan, self._waiting = worker, plan, waiting
        self._step: Pending | None = None

    def done(self) -> bool:
        """Return True: `wait` itself does the work."""
        return True

    def wait(self) -> StepResult:
        while self._step is None:
            self._waiting.popleft().run()
        return self._step.wait()

    def run(self) -> None:
        """Run the step and store its result."""
        self._step = self._worker.launch(self._plan)
