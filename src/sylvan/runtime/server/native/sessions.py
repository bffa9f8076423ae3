"""Sessions of `/generate`: opening, closing, and the prompt of a turn."""

from __future__ import annotations

from starlette.responses import Response

from sylvan.api.native import CloseSessionBody, OpenSessionBody
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response


async def open_session(call: Call[OpenSessionBody]) -> Response:
    """Begin a session; the answer is its id."""
    wanted: OpenSessionBody = call.body if call.body.model_fields_set else call.query
    if wanted.capacity_of_str_len is None:
        message = "capacity_of_str_len must be given."
        raise RequestError(message, param="capacity_of_str_len")
    return json_response(call.context.sessions.open(call.tenant.name, wanted))


async def close_session(call: Call[CloseSessionBody]) -> Response:
    """End a session and what still runs in it; 200 whether or not there was one."""
    wanted: CloseSessionBody = call.body if call.body.model_fields_set else call.query
    if wanted.session_id is None:
        raise RequestError("session_id must be given.", param="session_id")
    call.context.sessions.close(call.tenant.name, wanted.session_id)
    return Response()
