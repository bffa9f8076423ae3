"""Worker halves of both roles: they hold the network, and touch pages between forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.features.disagg.data import DecodeWork, PrefillWork
from sylvan.runtime.features.disagg.decode import DecodeRole
from sylvan.runtime.features.disagg.prefill import PrefillRole
from sylvan.runtime.features.disagg.receiver import Receiver
from sylvan.runtime.features.disagg.sender import Sender


class PrefillWorker(CapabilityWorker):
    """Sends pages beside the steps; what a step may give to others is copied before it.

    Args:
        start: Makes the sender; called once the model's memory is there.
    """

    name: ClassVar = PrefillRole.name

    def __init__(self, start: Callable[[], Sender]) -> None:
        self._start = start
        self._sender: Sender | None = None

    def open(self) -> Sender:
        """Start the sender, if that was not done."""
        if self._sender is None:
            self._sender = self._start()
        return self._sender

    def prepare(self, work: PrefillWork) -> None:
        """See `CapabilityWorker.prepare`."""
        self.open().begin(work)

    def after_forward(self, step: StepContext, work: PrefillWork) -> Report:
        """See `CapabilityWorker.after_forward`."""
        return self.open().events

    def idle_step(self, work: PrefillWork) -> Report:
        """See `CapabilityWorker.idle_step`."""
        return self.open().events

    def close(self) -> None:
        """See `CapabilityWorker.close`."""
        if self._sender is not None:
            self._sender.close()


class DecodeWorker(CapabilityWorker):
    """Begins after the copies of a step, so that these do not overwrite what arrives.

    Args:
        start: Makes the receiver; called once the model's memory is there.
    """

    name: ClassVar = DecodeRole.name

    def __init__(self, start: Callable[[], Receiver]) -> None:
        self._start = start
        self._receiver: Receiver | None = None

    def open(self) -> Receiver:
        """Start the receiver, if that was not done."""
        if self._receiver is None:
            self._receiver = self._start()
        return self._receiver

    def after_forward(self, step: StepContext, work: DecodeWork) -> Report:
        """See `CapabilityWorker.after_forward`."""
        return self.idle_step(work)

    def idle_step(self, work: DecodeWork) -> Report:
        """See `CapabilityWorker.idle_step`."""
        receiver = self.open()
        receiver.begin(work)
        return receiver.events

    def close(self) -> None:
        """See `CapabilityWorker.close`."""
        if self._receiver is not None:
            self._receiver.close()
