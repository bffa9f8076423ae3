"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, NotFoundError, json_response


async def models(call: Call[None]) -> Response:
    """All models that are served."""
    return json_response({"object": "list", "data": _cards(call.context)})


async def model(call: Call[None]) -> Response:
    """One model."""
    wanted = call.request.path_params["model"]
    for card in _cards(call.context):
        if card["id"] == wanted:
            return json_response(card)
    message = f"The model {wanted[:200]!r} does not exist."
    raise NotFoundError(message, param="model", code="model_not_found")


def _cards(context: Context) -> list[dict[str, Any]]:
    facts = context.engine.facts
    name = context.settings.served_model_name
    return [
        {
            "id": name,
            "object": "model",
            "created": int(context.started),
            "owned_by": "sylvan",
            "root": name,
            "parent": None,
            "max_model_len": facts.context_len,
        }
    ]
