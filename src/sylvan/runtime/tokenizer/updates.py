"""Updates of weights as trainers call for them: one at a time, or several calls as one."""

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
"""Within which weights have been read, packed and put into force."""
_NAME = "update"


class Steered(Protocol):
    """Runs commands on all replicas."""

    def control(self, command: Command, *, timeout_s: float) -> Awaitable[ControlReply]: ...


@dataclass(slots=True)
class _Bracket:
    """The state of an open bracket; `kept`: tensors were loaded."""

    kept: bool = False
    version: str | None = None
    flush: bool = False
    abort: bool = False


class WeightUpdates:
    """Carries out updates; between `begin` and `end` their tensors are only kept.

    Belongs to the event loop of the API process.
    """

    def __init__(self, replicas: Steered) -> None:
        self._replicas = replicas
        self._bracket: _Bracket | None = None

    async def update(self, command: UpdateWeights) -> ControlReply:
        """Replace weights now, or at the end of the bracket.

        Raises:
            CapacityError: a scheduler is being restarted, or did not answer in time.
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
        """Put all into force that was kept, or nothing of it.

        Raises:
            RequestError: no bracket is open, or nothing was kept.
            CapacityError: see `update`.
        """
        bracket, self._bracket = self._bracket, None
        if bracket is None:
            raise RequestError("no update has begun", status=400)
        if not bracket.kept:
            raise RequestError("the update has no tensors", status=400)
        command = UpdateWeights(
            NamedTensors(_NAME), version=bracket.version, flush=bracket.flush, abort=bracket.abort
        )
        reply = await self.send(command)
        await self.send(UnloadWeights(_NAME))
        return reply

    async def send(self, command: Command) -> ControlReply:
        """Have every replica carry out a command, however long it takes to read weights."""
        return await self._replicas.control(command, timeout_s=UPDATE_TIMEOUT_S)
