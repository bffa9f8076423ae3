"""Administrative routes."""

from __future__ import annotations

import asyncio
import gc

from starlette.responses import Response

from sylvan.api.errors import Family, error_body
from sylvan.api.native import AbortBody, ContinueBody, FlushQuery, PauseBody, RoleBody
from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import Command, FlushCache, Pause, Resume
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response, text_response
from sylvan.runtime.server.security import Level

FLUSH_POLL_S = 0.05


async def abort_request(call: Call[AbortBody]) -> Response:
    """Abort one request, or all; answers 200 even if there was none."""
    if call.body.abort_all:
        call.require_level(Level.ADMIN_OPTIONAL)
        call.context.engine.abort_all()
    elif call.body.rid:
        owner = None if call.tenant.admin else call.tenant.name
        call.context.engine.abort(call.body.rid, owner)
    return Response()


async def flush_cache(call: Call[None]) -> Response:
    """Empty the prefix cache; 400 if requests still run after the timeout."""
    query: FlushQuery = call.query
    context = call.context
    deadline = context.clock() + query.timeout
    while True:
        reply = await context.engine.control(FlushCache())
        if reply.ok:
            return text_response("Cache flushed.\n")
        if context.clock() >= deadline:
            why = reply.message or "requests are waiting or running"
            return text_response(f"The cache was not flushed: {why}.\n", status=400)
        await asyncio.sleep(FLUSH_POLL_S)


async def switch_role(call: Call[RoleBody]) -> Response:
    """Switch the disaggregation role for new requests; running requests finish in the old role."""
    role, body = call.context.role, call.body
    if not role.switches:
        message = "this server was not started with --enable-pd-role-switch"
        content = error_body(Family.NATIVE, 400, message)
        return json_response({**content, "success": False, "message": message}, status=400)
    before = role.current
    if not body.prepare_only:
        role.current = body.new_role
    found = {"success": True, "old_role": before, "new_role": body.new_role}
    return json_response({**found, "message": "", "prepared_only": body.prepare_only})


async def freeze_gc(call: Call[None]) -> Response:
    """Exempt current objects from garbage collection; the scheduler does this at start-up."""
    gc.collect()
    gc.freeze()
    return text_response("Garbage collection is frozen.\n")


async def pause_generation(call: Call[PauseBody]) -> Response:
    """Pause scheduling."""
    if call.body.mode == "abort":
        call.context.engine.abort_all()
    await _control(call.context, Pause(mode=call.body.mode))
    return json_response({"message": "Generation is paused.", "status": "ok"})


async def continue_generation(call: Call[ContinueBody]) -> Response:
    """Resume scheduling."""
    await _control(call.context, Resume())
    return json_response({"message": "Generation continues.", "status": "ok"})


async def _control(context: Context, command: Command) -> None:
    reply = await context.engine.control(command)
    if not reply.ok:
        raise CapacityError(reply.message or "The scheduler refused the command.")
