"""Routes that update, read and check weights, and release memory."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.weights import (
    BracketBody,
    CheckerBody,
    DiskBody,
    DistributedBody,
    GroupBody,
    LeaveBody,
    MemoryBody,
    SocketBody,
    TensorBody,
    TensorQuery,
    VersionBody,
    check_of,
    check_selector,
    disk_source,
    group_of,
    group_source,
    reading_of,
    socket_source,
    tags_of,
    tensor_source,
    update_of,
)
from sylvan.protocol.commands import BalanceExperts, LeaveGroup, ReleaseMemory, ResumeMemory
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import ControlReply, Pause, Resume, SetWeightVersion
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response


async def from_disk(call: Call[DiskBody]) -> Response:
    """Replace all weights with a checkpoint's; on a mismatch answer 400 and keep the old ones."""
    body, engine = call.body, call.context.engine
    pauses = body.keep_pause and not engine.load().paused
    if pauses:
        await engine.control(Pause(mode="in_place"))
    command = update_of(body, disk_source(body), partial=False)
    reply = await call.context.updates.update(command)
    if pauses and not reply.ok:
        await engine.control(Resume())
    return _updated(reply)


async def from_tensor(call: Call[TensorBody]) -> Response:
    """Replace weights with those of a safetensors file, in the request or in shared memory."""
    command = update_of(call.body, tensor_source(call.body), partial=True)
    return _updated(await call.context.updates.update(command))


async def from_distributed(call: Call[DistributedBody]) -> Response:
    """Replace weights with what rank 0 of a process group broadcasts."""
    command = update_of(call.body, group_source(call.body), partial=True)
    return _updated(await call.context.updates.update(command))


async def from_ipc(call: Call[SocketBody]) -> Response:
    """Replace weights with what a local socket sends."""
    command = update_of(call.body, socket_source(call.body), partial=True)
    return _updated(await call.context.updates.update(command))


async def begin(call: Call[BracketBody]) -> Response:
    """Collect the tensors of the following updates until they are committed together."""
    check_selector(call.body.selector)
    await call.context.updates.begin()
    return _succeeded("The update has begun.")


async def end(call: Call[BracketBody]) -> Response:
    """Commit all collected tensors, or none."""
    check_selector(call.body.selector)
    return _updated(await call.context.updates.end())


async def join_group(call: Call[GroupBody]) -> Response:
    """Join a process group; answers once all ranks have joined."""
    return _done(await call.context.updates.send(group_of(call.body)), "The group was joined.")


async def leave_group(call: Call[LeaveBody]) -> Response:
    """Leave a process group."""
    reply = await call.context.updates.send(LeaveGroup(call.body.group_name))
    return _done(reply, "The group was left.")


async def set_version(call: Call[VersionBody]) -> Response:
    """Set the version label of the weights."""
    engine, version = call.context.engine, call.body.new_version
    if call.body.abort_all_requests:
        engine.abort_all()
    reply = await engine.control(SetWeightVersion(version=version))
    if not reply.ok:
        raise RequestError(reply.message, status=reply.status)
    content = {"success": True, "message": "The weight version was updated."}
    return json_response({**content, "new_version": version})


async def read_tensor(call: Call[TensorQuery]) -> Response:
    """Return the first rows of a tensor, as nested lists."""
    found = await _body(call.context, reading_of(call.body, call.query))
    return json_response(found["values"])


async def check(call: Call[CheckerBody]) -> Response:
    """Return a checksum of each tensor."""
    found = await _body(call.context, check_of(call.body))
    content = {"success": True, "message": f"{len(found['checksums'])} tensors."}
    return json_response({**content, "checksums": found["checksums"]})


async def balance_experts(call: Call[None]) -> Response:
    """Move experts between groups of ranks, by the rows that they had since the last time."""
    found = await _body(call.context, BalanceExperts())
    return _succeeded(f"{found['moved']} experts were moved.", **found)


async def release_memory(call: Call[MemoryBody]) -> Response:
    """Release memory; requests wait until it is resumed."""
    found = await _body(call.context, ReleaseMemory(tags_of(call.body)))
    return _succeeded("The memory was released.", **found)


async def resume_memory(call: Call[MemoryBody]) -> Response:
    """Allocate the memory again, and continue."""
    found = await _body(call.context, ResumeMemory(tags_of(call.body)))
    return _succeeded("The memory was resumed.", **found)


async def _body(context: Context, command: Any) -> dict[str, Any]:
    """Return the result of a command.

    Raises:
        RequestError: The command was rejected.
    """
    reply = await context.updates.send(command)
    if not reply.ok:
        raise RequestError(reply.message, status=reply.status)
    return reply.body or {}


def _updated(reply: ControlReply) -> Response:
    body = reply.body or {}
    fields = {k: body[k] for k in ("num_paused_requests", "weight_version") if k in body}
    count = body.get("num_tensors", 0)
    return _done(reply, f"{count} tensors were updated.", **fields)


def _done(reply: ControlReply, message: str, **fields: Any) -> Response:
    if reply.ok:
        return _succeeded(message, **fields)
    content = {"success": False, "message": reply.message}
    return json_response(content, status=reply.status)


def _succeeded(message: str, **fields: Any) -> Response:
    return json_response({"success": True, "message": message, **fields})
