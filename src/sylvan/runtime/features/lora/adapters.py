"""Builds the control half, and executes adapter commands. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sylvan.config.tree import LoraConfig
from sylvan.protocol.adapters import AdapterInfo, encode_adapters
from sylvan.protocol.commands import CommandResult, LoadAdapter
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.protocol.messages import Finish, RegisterAdapter, UnloadAdapter
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.features.lora.control import Lora, LoraLimits
from sylvan.runtime.features.lora.copies import AdapterEntry
from sylvan.runtime.sched.scheduler import Scheduler

_UNLOADED = Finish(type="abort", message="the adapter was unloaded", status=503)


class LoraAdapters:
    """The adapters of one scheduler.

    Args:
        settings: Resolved settings.

    Attributes:
        control: The control half.
    """

    def __init__(self, settings: LoraConfig) -> None:
        self._settings = settings
        room = _number(settings.memory)
        self.control = Lora(
            LoraLimits(
                slots=settings.max_per_batch,
                copies=settings.max_loaded or room,  # at least one byte each
                copy_bytes=room,
                max_overtakes=settings.max_overtakes,
                eviction=settings.eviction,
            )
        )

    def load(self, executor: Executor) -> str:
        """Load the configured adapters; return them as JSON, for the API process.

        Raises:
            ConfigError: One cannot be served; the message names it.
        """
        found: list[AdapterInfo] = []
        for name, path in self._settings.adapters.items():
            pinned = name in self._settings.pinned
            keep = pinned or self.control.has_room
            command = LoadAdapter(name, path, pinned, keep)
            result = executor.control(command).wait()
            if result.error:
                raise ConfigError(f"lora.adapters={name}={path}: {result.error}")
            self.loaded(command, result)
            body = result.body
            found.append(
                AdapterInfo(
                    name=name,
                    id=body["id"],
                    path=path,
                    rank=body["rank"],
                    num_bytes=body["num_bytes"],
                    pinned=command.pinned,
                )
            )
        return encode_adapters(found)

    def loaded(self, command: LoadAdapter, result: CommandResult) -> CommandResult:
        """Enable an adapter that the executor has read; return the final result."""
        body = result.body
        adapter = AdapterEntry(body["id"], command.path, body["num_bytes"], pinned=command.pinned)
        try:
            self.control.add(adapter, resident=command.keep)
        except RequestError as error:
            return CommandResult(error=str(error), status=error.status, blocked=result.blocked)
        return result

    @property
    def counts(self) -> dict[str, int]:
        """Return the usage of slots and host memory, as fields of `SchedulerLoad`."""
        load = self.control.load
        return {
            "lora_slots_used": load.slots_used,
            "lora_slots_total": load.slots_total,
            "lora_adapters": load.loaded,
            "lora_copies": load.copies,
        }

    def execute(
        self, command: RegisterAdapter | UnloadAdapter, scheduler: Scheduler
    ) -> Mapping[str, Any]:
        """Execute a command that does not involve the executor.

        Raises:
            RequestError: The maximum of adapters is pinned.
        """
        if isinstance(command, RegisterAdapter):
            adapter = AdapterEntry(
                command.id, command.path, command.num_bytes, pinned=command.pinned
            )
            self.control.add(adapter, resident=False)
            return {}
        live = [*scheduler.running, *scheduler.waiting]
        rids = self.control.remove(command.id, live)
        for rid in rids if command.abort else ():
            scheduler.abort(rid, _UNLOADED)
        return {"num_requests": len(rids)}


def _number(value: int | str) -> int:
    assert isinstance(value, int), "a resolved configuration has no auto"
    return value
