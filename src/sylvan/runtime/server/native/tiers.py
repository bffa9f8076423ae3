"""Stores of KV below the prefix cache: attach, detach, clear and look at them while serving."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.tiers import StoreBody, attach_of
from sylvan.protocol.errors import RequestError
from sylvan.protocol.tiers import ClearStore, DescribeTiers, DetachStore, TierCommand
from sylvan.runtime.server.endpoint import Call, json_response, text_response


async def attach_store(call: Call[StoreBody]) -> Response:
    """Use a store from now on; 400 if there is one, or it holds pages of another model."""
    body = await _run(call, attach_of(call.body))
    return json_response({"success": True, "message": "The store is attached.", **body})


async def detach_store(call: Call[None]) -> Response:
    """Use no store any more; what it holds stays there."""
    body = await _run(call, DetachStore())
    return json_response({"success": True, "message": "The store is detached.", **body})


async def describe_store(call: Call[None]) -> Response:
    """Which store there is, how it is used, and what was counted."""
    return json_response(await _run(call, DescribeTiers()))


async def clear_store(call: Call[None]) -> Response:
    """Remove all pages of the store."""
    await _run(call, ClearStore())
    return text_response("The KV store is empty.\n")


async def store_layout(call: Call[None]) -> Response:
    """What a page of the store consists of."""
    body = await _run(call, DescribeTiers())
    return json_response({"page_size": body["page_size"], "groups": body["layout"]})


async def _run(call: Call[Any], command: TierCommand) -> dict[str, Any]:
    reply = await call.context.engine.control(command)
    if not reply.ok or reply.body is None:
        raise RequestError(reply.message or "there are no KV tiers", status=reply.status)
    return reply.body
