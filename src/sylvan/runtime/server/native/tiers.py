"""Routes that attach, detach, clear and inspect a KV store at run time."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.tiers import StoreBody, attach_of
from sylvan.protocol.errors import RequestError
from sylvan.protocol.tiers import ClearStore, DescribeTiers, DetachStore, TierCommand
from sylvan.runtime.server.endpoint import Call, json_response, text_response


async def attach_store(call: Call[StoreBody]) -> Response:
    """Attach a store; 400 if one is attached, or it holds pages of another model."""
    body = await _run(call, attach_of(call.body))
    return json_response({"success": True, "message": "The store is attached.", **body})


async def detach_store(call: Call[None]) -> Response:
    """Detach the store; its contents stay."""
    body = await _run(call, DetachStore())
    return json_response({"success": True, "message": "The store is detached.", **body})


async def describe_store(call: Call[None]) -> Response:
    """Describe the attached store, its settings and counters."""
    return json_response(await _run(call, DescribeTiers()))


async def clear_store(call: Call[None]) -> Response:
    """Delete all pages in the store."""
    await _run(call, ClearStore())
    return text_response("The KV store is empty.\n")


async def store_layout(call: Call[None]) -> Response:
    """Return the layout of a page in the store."""
    body = await _run(call, DescribeTiers())
    return json_response({"page_size": body["page_size"], "groups": body["layout"]})


async def _run(call: Call[Any], command: TierCommand) -> dict[str, Any]:
    reply = await call.context.engine.control(command)
    if not reply.ok or reply.body is None:
        raise RequestError(reply.message or "there are no KV tiers", status=reply.status)
    return reply.body
