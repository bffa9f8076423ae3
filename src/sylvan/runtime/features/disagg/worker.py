"""Worker halves of both roles: they own the network, and access pages between forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from sylvan.kernels.api import Communicator
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.features.disagg.decode import DecodeRole
from sylvan.runtime.features.disagg.prefill import PrefillRole
from sylvan.runtime.features.disagg.rank_agreement import Agreement
from sylvan.runtime.features.disagg.receiver import Receiver
from sylvan.runtime.features.disagg.sender import Sender
from sylvan.runtime.features.disagg.work import (
    DecodeWork,
    Leave,
    PrefillAgain,
    PrefillWork,
    Withdraw,
)


class PrefillWorker(CapabilityWorker):
    """Sends pages concurrently with steps; copies pages first that a step may free.

    Args:
        start: Creates the sender; called once the model's memory exists.
        ranks: Ranks of this server.
    """

    name: ClassVar = PrefillRole.name

    def __init__(self, start: Callable[[], Sender], ranks: Communicator) -> None:
        self._start = start
        self._sender: Sender | None = None
        self._agreement = Agreement(ranks, self._give_up) if ranks.size > 1 else None

    def open(self) -> Sender:
        """Start the sender, if not started yet."""
        if self._sender is None:
            self._sender = self._start()
        return self._sender

    def prepare(self, work: PrefillWork) -> None:
        self.open().begin(work)

    def after_forward(self, step: StepContext, work: PrefillWork) -> Report:
        return self.idle_step(work)

    def idle_step(self, work: PrefillWork) -> Report:
        sender = self.open()
        if self._agreement is None:
            return sender.events
        found = self._agreement.agree(sender.events())
        return lambda: found

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _give_up(self, job: int) -> None:
        self.open().begin((Withdraw(job, "another rank could not transfer its part"),))


class DecodeWorker(CapabilityWorker):
    """Starts after the copies of a step, so that these do not overwrite what arrives.

    Args:
        start: Creates the receiver; called once the model's memory exists.
        ranks: Ranks of this server.
    """

    name: ClassVar = DecodeRole.name

    def __init__(self, start: Callable[[], Receiver], ranks: Communicator) -> None:
        self._start = start
        self._receiver: Receiver | None = None
        self._is_first = ranks.rank == 0
        self._agreement = Agreement(ranks, self._give_up) if ranks.size > 1 else None

    def open(self) -> Receiver:
        """Start the receiver, if not started yet."""
        if self._receiver is None:
            self._receiver = self._start()
        return self._receiver

    def after_forward(self, step: StepContext, work: DecodeWork) -> Report:
        return self.idle_step(work)

    def idle_step(self, work: DecodeWork) -> Report:
        receiver = self.open()
        if not self._is_first:  # one rank asks for all
            work = tuple(item for item in work if not isinstance(item, PrefillAgain))
        receiver.begin(work)
        if self._agreement is None:
            return receiver.events
        found = self._agreement.agree(receiver.events())
        return lambda: found

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _give_up(self, job: int) -> None:
        self.open().begin((Leave(job),))
