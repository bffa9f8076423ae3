"""Sessions of `/generate`: opening, closing, and the prompt of a turn."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.responses import Response

from sylvan.api.native import CloseSessionBody, OpenSessionBody, Prompt, SessionParams
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.stores.sessions import NewTurn, Turn


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


async def begin_turn(call: Call[Any], params: SessionParams, prompt: Prompt) -> Turn:
    """The next turn of a session; its owner ends it.

    Raises:
        RequestError: The session does not allow it.
        CapacityError: The sessions of the tenant are full.
    """
    context = call.context
    if prompt.sampling.n > 1:
        message = "sampling_params.n: a turn of a session has one sample."
        raise RequestError(message, param="sampling_params.n")
    ids = prompt.input_ids
    if ids is None:
        ids = await context.engine.tokenize(prompt.text or "")
    new = NewTurn(
        rid=prompt.rid or secrets.token_hex(16),
        ids=ids,
        max_new_tokens=prompt.sampling.max_new_tokens,
    )
    return context.sessions.begin(call.tenant.name, params, new)
