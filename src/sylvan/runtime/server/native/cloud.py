"""Routes that cloud platforms call: SageMaker's `/ping`, Vertex AI's `/vertex_generate`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.responses import Response

from sylvan.api.extras import unknown_fields
from sylvan.api.native import GenerateBody
from sylvan.api.validation import WireModel, parse
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.native.generate import replies
from sylvan.runtime.server.native.health import health
from sylvan.runtime.server.streaming import unless_gone

ping = health


class VertexBody(WireModel):
    """Prompts and the parameters they share."""

    instances: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1024)]
    """Prompts: objects with `text` or `input_ids`."""
    parameters: dict[str, Any] | None = None
    """Further fields of `/generate`, such as `sampling_params`."""


class VertexReply(BaseModel):
    """One answer per prompt."""

    predictions: list[Any]


async def vertex_generate(call: Call[VertexBody]) -> Response:
    """Continue prompts."""
    body = call.body
    shared = body.parameters or {}
    bodies = [parse(GenerateBody, {**shared, **one, "stream": False}) for one in body.instances]
    for one in bodies:
        call.ignored.extend(unknown_fields(one))
    work = asyncio.gather(*(replies(call, one) for one in bodies))
    return json_response({"predictions": await unless_gone(call.request, work)})
