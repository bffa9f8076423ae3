"""Weight and memory methods of `sylvan.Engine`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sylvan.api.weights import (
    DiskBody,
    DistributedBody,
    GroupBody,
    MemoryBody,
    SocketBody,
    UpdateBody,
    disk_source,
    group_of,
    group_source,
    socket_source,
    tags_of,
    update_of,
)
from sylvan.protocol.commands import (
    ExecutorCommand,
    HashWeights,
    LeaveGroup,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    SharedTensors,
)
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import ControlReply
from sylvan.runtime.tokenizer.weight_updates import WeightUpdates

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""PyTorch tensors by name."""
UpdateResult = tuple[bool, str]
"""Whether it succeeded, and the error."""
_SHARED = Path("/dev/shm")


class EngineWeights:
    """Converts method calls to `WeightUpdates`."""

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates

    async def from_disk(self, body: DiskBody) -> UpdateResult:
        """See `Engine.update_weights_from_disk`."""
        return _update_result(
            await self._updates.update(update_of(body, disk_source(body), partial=False))
        )

    async def from_tensors(self, named: NamedTensors, body: UpdateBody) -> UpdateResult:
        """See `Engine.update_weights_from_tensor`."""
        with _shared(dict(named)) as source:
            return _update_result(await self._updates.update(update_of(body, source, partial=True)))

    async def from_distributed(self, body: DistributedBody) -> UpdateResult:
        """See `Engine.update_weights_from_distributed`."""
        command = update_of(body, group_source(body), partial=True)
        return _update_result(await self._updates.update(command))

    async def from_ipc(self, body: SocketBody) -> UpdateResult:
        """See `Engine.update_weights_from_ipc`."""
        command = update_of(body, socket_source(body), partial=True)
        return _update_result(await self._updates.update(command))

    async def end(self) -> UpdateResult:
        """See `Engine.end_weight_update`."""
        return _update_result(await self._updates.end())

    async def join_group(self, body: GroupBody) -> UpdateResult:
        """See `Engine.init_weights_update_group`."""
        return _update_result(await self._updates.send(group_of(body)))

    async def leave_group(self, name: str) -> UpdateResult:
        """See `Engine.destroy_weights_update_group`."""
        return _update_result(await self._updates.send(LeaveGroup(name)))

    async def tensor(self, name: str, limit: int) -> list[Any]:
        """See `Engine.get_weights_by_name`."""
        return (await self._body(ReadWeights(name, limit)))["values"]

    async def checksums(self, skip: tuple[str, ...]) -> dict[str, str]:
        """See `Engine.check_weights`."""
        return (await self._body(HashWeights(skip)))["checksums"]

    async def release(self, body: MemoryBody) -> dict[str, Any]:
        """See `Engine.release_memory_occupation`."""
        return await self._body(ReleaseMemory(tags_of(body)))

    async def resume(self, body: MemoryBody) -> dict[str, Any]:
        """See `Engine.resume_memory_occupation`."""
        return await self._body(ResumeMemory(tags_of(body)))

    async def _body(self, command: ExecutorCommand) -> dict[str, Any]:
        reply = await self._updates.send(command)
        if not reply.ok:
            raise RequestError(reply.message, status=reply.status)
        return reply.body or {}


def safetensors_of(named: NamedTensors) -> bytes:
    """Serialise tensors as a safetensors file."""
    from safetensors.torch import save  # callers with tensors have imported torch already

    tensors = {name: value.detach().cpu().contiguous() for name, value in dict(named).items()}
    return save(_without_aliases(tensors))


def _update_result(reply: ControlReply) -> UpdateResult:
    return reply.ok, reply.message


@contextmanager
def _shared(named: Mapping[str, Any]) -> Iterator[SharedTensors]:
    """Serialise tensors into shared memory, which exists while the context is open."""
    from safetensors.torch import save_file  # callers with tensors have imported torch already

    tensors = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    path = _SHARED / f"sylvan-update-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        save_file(_without_aliases(tensors), path)
        yield SharedTensors(path.name, path.stat().st_size)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _without_aliases(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copy tensors that share memory (tied weights), which the format does not allow."""
    seen: set[int] = set()
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found
