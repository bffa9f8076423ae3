"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response


async def models(call: Call[None]) -> Response:
    """List the served models."""
    return json_response({"object": "list", "data": _cards(call)})


async def model(call: Call[None]) -> Response:
    """Describe one model."""
    wanted = call.request.path_params["model"]
    for card in _cards(call):
        if card["id"] == wanted:
            return json_response(card)
    message = f"The model {wanted[:200]!r} does not exist."
    raise NotFoundError(message, param="model", code="model_not_found")


def _cards(call: Call[None]) -> list[dict[str, Any]]:
    """Describe the model, and the adapters that the caller may use."""
    context = call.context
    name = context.settings.served_model_name
    adapters = context.engine.adapters.served(call.tenant.name)
    entries = [(name, name, None), *((a.name, a.path, name) for a in adapters)]
    return [
        {
            "id": own,
            "object": "model",
            "created": int(context.started),
            "owned_by": "sylvan",
            "root": root,
            "parent": parent,
            "max_model_len": context.engine.facts.context_len,
        }
        for own, root, parent in entries
    ]
