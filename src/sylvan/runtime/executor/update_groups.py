"""Process groups of torch.distributed that broadcast weight updates; the trainer is rank 0."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from sylvan.protocol.commands import GroupTensors, JoinGroup
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.in_memory import InMemory
from sylvan.runtime.models.safetensors import DTYPES

_BACKENDS = ("gloo",)


class UpdateGroups:
    """Groups that this process has joined, by name; each has its own connections.

    Both sides meet at `tcp://address:port`, where rank 0 hosts the store, under the group's name
    (`PrefixStore`), so a group neither needs nor disturbs a default process group.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def join(self, command: JoinGroup) -> None:
        """Join a group; blocks until all of its ranks have joined.

        Raises:
            ConfigError: the name is taken, the backend is unavailable, or other ranks did not join.
        """
        if command.name in self._groups:
            raise ConfigError(f"group_name {command.name!r} has been joined already")
        if command.backend not in _BACKENDS:
            raise ConfigError(
                f"backend must be {' or '.join(_BACKENDS)} on this machine, not {command.backend!r}"
            )
        if not 0 < command.rank < command.world_size:
            raise ConfigError(
                f"rank_offset {command.rank} must be in 1..{command.world_size - 1}: rank 0 sends"
            )
        try:
            self._groups[command.name] = make_group(
                command.address,
                command.port,
                command.rank,
                command.world_size,
                command.name,
                command.timeout_s,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"group {command.name!r} at {command.address}:{command.port} did not form within "
                f"{command.timeout_s:g} s: {reason}"
            ) from error

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            ConfigError: no group has this name.
        """
        self._group(name)
        del self._groups[name]

    def receive(self, source: GroupTensors, max_bytes: int) -> InMemory:
        """Receive tensors that rank 0 broadcasts, in the order of their names.

        Raises:
            ConfigError: there is no such group or type, the lists differ in length, or rank 0 sent
                nothing.
        """
        group = self._group(source.group)
        if not len(source.names) == len(source.dtypes) == len(source.shapes):
            raise ConfigError(
                f"{len(source.names)} names, {len(source.dtypes)} dtypes and {len(source.shapes)} "
                "shapes: the lists must have the same length"
            )
        room = {
            name: (_dtype(kind), shape)
            for name, kind, shape in zip(source.names, source.dtypes, source.shapes, strict=True)
        }
        if len(room) < len(source.names):
            raise ConfigError("names must be unique")
        total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in room.values())
        if total > max_bytes or any(n < 0 for _, shape in room.values() for n in shape):
            raise ConfigError(f"shapes of {total:,} bytes; at most {max_bytes:,}")
        found = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in room.items()}
        try:
            if source.flat:
                _broadcast_flat(group, found, total)
            for tensor in () if source.flat else found.values():
                broadcast(group, tensor)
        except RuntimeError as error:
            raise ConfigError(
                f"rank 0 of {source.group!r} did not send: {str(error).splitlines()[0]}"
            ) from error
        return InMemory(found)

    def close(self) -> None:
        """Leave all groups."""
        self._groups.clear()

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            raise ConfigError(f"group_name {name!r} was not joined")
        return self._groups[name]


def make_group(
    address: str, port: int, rank: int, world_size: int, name: str, timeout_s: float = 60.0
) -> Any:
    """Create a gloo process group that is independent of all others; rank 0 hosts the store.

    Raises:
        RuntimeError: the ranks did not meet in time.
    """
    c10d: Any = importlib.import_module("torch.distributed")  # rarely needed
    timeout = timedelta(seconds=timeout_s)
    store = c10d.TCPStore(address, port, world_size, rank == 0, timeout, wait_for_workers=False)
    prefixed = c10d.PrefixStore(name, store)
    return c10d.ProcessGroupGloo(prefixed, rank, world_size, timeout)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send a tensor as rank 0, or receive it in place as another rank; blocks.

    Raises:
        RuntimeError: another rank was lost or late.
    """
    group.broadcast(tensor, 0).wait()


def _broadcast_flat(group: Any, tensors: Mapping[str, torch.Tensor], num_bytes: int) -> None:
    whole = torch.empty(num_bytes, dtype=torch.uint8)
    broadcast(group, whole)
    parts = whole.split([tensor.numel() * tensor.itemsize for tensor in tensors.values()])
    for tensor, part in zip(tensors.values(), parts, strict=True):
        tensor.view(-1).view(torch.uint8).copy_(part)


def _dtype(name: str) -> torch.dtype:
    found: object = getattr(torch, name.removeprefix("torch."), None)
    # other types are not supported
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise ConfigError(f"dtypes: there is no type {name!r}")
    return found
