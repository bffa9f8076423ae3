"""Routes that open and close sessions of `/generate`."""

from __future__ import annotations

from starlette.responses import Response

from sylvan.api.native import CloseSessionBody, OpenSessionBody
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response


async def open_session(call: Call[OpenSessionBody]) -> Response:
    """Open a session; return its ID."""
    wanted: OpenSessionBody = call.body if call.body.model_fields_set else call.query
    if wanted.capacity_of_str_len is None:
        message = "capacity_of_str_len must be given."
        raise RequestError(message, param="capacity_of_str_len")
    return json_response(call.context.sessions.open(call.tenant.name, wanted))


async def close_session(call: Call[CloseSessionBody]) -> Response:
    """Close a session and abort its requests; answers 200 even if there was none."""
    wanted: CloseSessionBody = call.body if call.body.model_fields_set else call.query
    if wanted.session_id is None:
        raise RequestError("session_id must be given.", param="session_id")
    call.context.sessions.close(call.tenant.name, wanted.session_id)
    return Response()
