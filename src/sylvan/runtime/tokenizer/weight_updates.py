"""Weight updates: in one call, or in several that are committed together."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from sylvan.protocol.commands import (
    LoadWeights,
    NamedTensors,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import Command, ControlReply

UPDATE_TIMEOUT_S = 1800.0
"""Timeout for reading, packing and applying weights, in seconds."""
_NAME = "update"


class CommandRunner(Protocol):
    """Executes commands on all replicas."""

    def control(self, command: Command, *, timeout_s: float) -> Awaitable[ControlReply]: ...


@dataclass(slots=True)
class _Bracket:
    """The state of an open update; `kept`: tensors were loaded."""

    kept: bool = False
    version: str | None = None
    flush: bool = False
    abort: bool = False


class WeightUpdates:
    """Executes updates; between `begin` and `end` their tensors are only collected.

    Belongs to the event loop of the API process.
    """

    def __init__(self, replicas: CommandRunner) -> None:
        self._replicas = replicas
        self._bracket: _Bracket | None = None

    async def update(self, command: UpdateWeights) -> ControlReply:
        """Replace weights now, or at the `end` of the open update.

        Raises:
            CapacityError: A scheduler is restarting, or did not answer in time.
        """
        bracket = self._bracket
        if bracket is None:
            return await self.send(command)
        reply = await self.send(LoadWeights(_NAME, command.source))
        if reply.ok:
            bracket.kept = True
            bracket.version = command.version or bracket.version
            bracket.flush |= command.flush
            bracket.abort |= command.abort
        return reply

    async def begin(self) -> None:
        """Start collecting tensors of the following updates; frees those of an unfinished bracket.

        Raises:
            CapacityError: see `update`.
        """
        left, self._bracket = self._bracket, _Bracket()
        if left is not None and left.kept:
            await self.send(UnloadWeights(_NAME))

    async def end(self) -> ControlReply:
        """Commit everything collected, or nothing.

        Raises:
            RequestError: No update was begun, or nothing was collected.
            CapacityError: see `update`.
        """
        bracket, self._bracket = self._bracket, None
        if bracket is None:
            raise RequestError("no update was begun", status=400)
        if not bracket.kept:
            raise RequestError("the update contains no tensors", status=400)
        command = UpdateWeights(
            NamedTensors(_NAME), version=bracket.version, flush=bracket.flush, abort=bracket.abort
        )
        reply = await self.send(command)
        await self.send(UnloadWeights(_NAME))
        return reply

    async def send(self, command: Command) -> ControlReply:
        """Execute a command on every replica, however long reading weights takes."""
        return await self._replicas.control(command, timeout_s=UPDATE_TIMEOUT_S)
