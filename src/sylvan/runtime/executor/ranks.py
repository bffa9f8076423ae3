"""Runs one model on several ranks: the other ranks follow the first rank's stream of steps.

Every rank gets the same plans and computes the whole step, including sampling, so that collectives
match whatever capabilities do. Only the first rank's results are used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sylvan.protocol.commands import (
    BalanceExperts,
    CommandResult,
    ExecutorCommand,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    LoadWeights,
    ReadWeights,
    SharedTensors,
    SocketTensors,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import CapacityError, ExecutorError, RankLostError
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.executor.api import Executor, FinishedCommand, Pending, PendingCommand
from sylvan.runtime.executor.rank_commands import CommandRound, Plan, Round, Rounds, plan_of
from sylvan.transport.api import DuplexChannel

logger = logging.getLogger(__name__)

AGREE_TIMEOUT_S = 5.0
"""Time in which all ranks must report that a step failed; otherwise the group is lost."""
_POLL_S = 0.5


class RunStep(msgspec.Struct, tag=True, frozen=True):
    """Run a step; `data` is its encoded plan."""

    data: bytes


class RunCommand(msgspec.Struct, tag=True, frozen=True):
    """Run a command between steps."""

    data: bytes


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """The step failed on the sender; its requests have ended."""

    number: int


class Close(msgspec.Struct, tag=True, frozen=True):
    """End the stream."""


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """The last pipeline stage has sampled; `data` is the result."""

    number: int
    data: bytes


class CommandDone(msgspec.Struct, tag=True, frozen=True):
    """Result of a command."""

    data: bytes


ToRank = RunStep | RunCommand | StepFailed | Close
FromRank = StepFailed | StepDone | CommandDone
_OF_WEIGHTS = (
    LoadWeights,
    UnloadWeights,
    UpdateWeights,
    ReadWeights,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    BalanceExperts,
)


class RankedExecutor:
    """Implements `Executor` over this rank's executor and streams to the others.

    Args:
        executor: Executor of the first rank; it runs a step when the step is waited for.
        others: Streams to the other ranks, in order.
        codec: Encodes plans.
        check: Raises RankLostError if a collective of the step has failed.
        several_machines: Whether ranks share no memory; updates then come from files or groups.
        sampler: Rank of the last pipeline stage whose results count; 0: this rank.
    """

    def __init__(
        self,
        executor: Executor,
        others: Sequence[DuplexChannel[ToRank, FromRank]],
        codec: StepCodec,
        check: Callable[[], None],
        *,
        several_machines: bool = False,
        sampler: int = 0,
    ) -> None:
        self._several_machines = several_machines
        self._sampler = others[sampler - 1] if sampler else None
        self.caps = executor.caps
        self._check = check
        self._executor, self._others, self._codec = executor, tuple(others), codec
        self._unfinished: deque[_RankedStep] = deque()
        self._is_lost = False

    def launch(self, plan: StepPlan) -> Pending:
        try:
            self._send(RunStep(self._codec.encode(plan)))
        except RankLostError:
            self._is_lost = True
            raise
        step = _RankedStep(self._executor.launch(plan), plan.number, self._finish)
        self._unfinished.append(step)
        return step

    def control(self, command: ExecutorCommand) -> PendingCommand:
        plan: Plan | str = _of_one_machine(command) if self._several_machines else ""
        if self._sampler is not None and isinstance(command, _OF_WEIGHTS):
            plan = "weights can neither be read nor replaced while pipeline stages share them"
        plan = plan or plan_of(command, 1 + len(self._others))
        if isinstance(plan, str):
            return FinishedCommand(CommandResult(error=plan))
        return Rounds(plan, self._send_round)

    def _send_round(self, commands: Round) -> CommandRound:
        own, *theirs = commands
        targets = self._others[: len(theirs)]
        for other, command in zip(targets, theirs, strict=True):
            other.send(RunCommand(self._codec.encode(command)))
        return _RankRound(self._executor.control(own), targets, self._codec)

    def close(self) -> None:
        """Stop the remaining ranks. Whoever created the channels closes them.

        They run all launched steps, so this rank runs them as well.
        """
        while self._unfinished and not self._is_lost:
            with contextlib.suppress(ExecutorError, RankLostError):
                self._unfinished[0].wait()
        for other in self._others:
            with contextlib.suppress(RankLostError, CapacityError):
                other.send(Close())
        self._executor.close()

    def _send(self, message: ToRank) -> None:
        for other in self._others:
            other.send(message)

    def _finish(self, step: _RankedStep) -> StepResult:
        """The result of a step on all ranks: see `_RankedStep.wait`."""
        self._unfinished.remove(step)
        try:
            try:
                result = step.pending.wait()
            except ExecutorError:
                self._check()
                self._agree_on_failure(step.number)
                raise
            if self._sampler is not None:
                result = self._sampled(self._sampler, step.number)
            self._check()
        except RankLostError:
            self._is_lost = True
            raise
        return result

    def _sampled(self, sampler: DuplexChannel[ToRank, FromRank], number: int) -> StepResult:
        """Results of the last pipeline stage."""
        while (answer := sampler.receive(_POLL_S)) is None:
            self._check()
        if not isinstance(answer, StepDone) or answer.number != number:
            raise RankLostError(f"the last pipeline stage has no result of step {number}")
        return self._codec.result(answer.data)

    def _agree_on_failure(self, number: int) -> None:
        """Return only if all ranks agree that this step failed.

        Raises:
            RankLostError: a rank does not answer; it is stuck in a collective.
        """
        self._send(StepFailed(number))
        until = time.monotonic() + AGREE_TIMEOUT_S
        for rank, other in enumerate(self._others, 1):
            answer = other.receive(max(0.0, until - time.monotonic()))
            if not isinstance(answer, StepFailed) or answer.number != number:
                raise RankLostError(f"rank {rank} does not know that step {number} failed")


def _of_one_machine(command: ExecutorCommand) -> str:
    """Return why a command cannot reach ranks on several machines; empty if it can."""
    source = getattr(command, "source", None)
    if isinstance(source, SharedTensors | SocketTensors):
        return "ranks on other machines cannot read this memory; use files or a process group"
    return ""


@dataclass(slots=True, eq=False)
class _RankedStep:
    """Implements `Pending`; call `wait` once."""

    pending: Pending
    number: int
    finish: Callable[[_RankedStep], StepResult]

    def done(self) -> bool:
        return self.pending.done()

    def wait(self) -> StepResult:
        """See `Pending.wait`.

        Raises:
            RankLostError: another rank has ended or does not answer.
        """
        return self.finish(self)


class _RankRound:
    """Implements `CommandRound`: done when all ranks are done."""

    def __init__(
        self,
        own: PendingCommand,
        others: Sequence[DuplexChannel[ToRank, FromRank]],
        codec: StepCodec,
    ) -> None:
        self._own, self._codec = own, codec
        self._missing = dict(enumerate(others, 1))
        self._found: dict[int, CommandResult] = {}

    def done(self) -> bool:
        self._receive(0.0)
        return self._own.done() and not self._missing

    def wait(self) -> list[CommandResult]:
        own = self._own.wait()
        while self._missing:
            self._receive(_POLL_S)
        return [own, *(self._found[rank] for rank in sorted(self._found))]

    def _receive(self, timeout_s: float) -> None:
        for rank, other in tuple(self._missing.items()):
            answer = other.receive(timeout_s)
            if answer is None:
                continue
            if not isinstance(answer, CommandDone):
                raise RankLostError(f"rank {rank} failed on a step that succeeded on other ranks")
            self._found[rank] = self._codec.answer(answer.data)
            del self._missing[rank]


class Follower:
    """Another rank: runs the steps and commands of the first rank.

    Args:
        executor: Executor of this rank; it runs a step when the step is waited for.
        first: Stream from the first rank.
        codec: Decodes plans.
        check: Raises RankLostError if a collective of the step has failed.
        samples: Whether its results are used: it is the sampler of `RankedExecutor`.
        queued: Number of launched steps that need not be waited for yet; more than 0 on devices,
            which would idle between steps otherwise.
    """

    def __init__(
        self,
        executor: Executor,
        first: DuplexChannel[FromRank, ToRank],
        codec: StepCodec,
        check: Callable[[], None],
        *,
        samples: bool = False,
        queued: int = 0,
    ) -> None:
        self._check, self._samples, self._queued = check, samples, queued
        self._executor, self._first, self._codec = executor, first, codec
        self._ahead: deque[RunStep] = deque()  # received while waiting for a failure report
        self._pending: deque[tuple[int, Pending]] = deque()  # launched here, with step numbers
        self._failed = -1  # number of the newest pending step that failed on the first rank

    def run(self) -> None:
        """Follow the first rank until it closes.

        Raises:
            RankLostError: another rank has ended, or this one cannot follow any more.
        """
        while True:
            message = self._ahead.popleft() if self._ahead else self._first.receive(_POLL_S)
            if not isinstance(message, RunStep | StepFailed):
                self._finish(0)
            match message:
                case None:
                    continue
                case RunStep(data=data):
                    self._launch(self._codec.plan(data))
                    self._finish(self._queued)
                case RunCommand(data=data):
                    found = self._executor.control(self._codec.command(data)).wait()
                    self._first.send(CommandDone(self._codec.encode(found)))
                case StepFailed(number=number) if any(number == n for n, _ in self._pending):
                    self._failed = number
                    self._finish(0)
                case StepFailed():
                    self._first.send(message)
                case Close():
                    return

    def _launch(self, plan: StepPlan) -> None:
        self._pending.append((plan.number, self._executor.launch(plan)))

    def _finish(self, left: int) -> None:
        """Wait for launched steps until `left` of them remain."""
        while len(self._pending) > left:
            number, step = self._pending.popleft()
            try:
                result = step.wait()
                if self._samples:
                    self._first.send(StepDone(number, self._codec.encode(result)))
            except ExecutorError as error:
                if number != self._failed and not self._has_failed_elsewhere(number):
                    raise RankLostError(f"step {number} failed on this rank only") from error
                logger.warning("step %d failed on all ranks: %s", number, error)
                self._first.send(StepFailed(number))
            self._check()

    def _has_failed_elsewhere(self, number: int) -> bool:
        """Whether the first rank reports this failure, possibly after steps launched earlier."""
        until = time.monotonic() + AGREE_TIMEOUT_S
        while True:
            message = self._first.receive(max(0.0, until - time.monotonic()))
            if not isinstance(message, RunStep):
                return message == StepFailed(number)
            self._ahead.append(message)
