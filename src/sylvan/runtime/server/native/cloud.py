"""Routes that cloud platforms call: SageMaker's `/ping`, Vertex AI's `/vertex_generate`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field
from starlette.responses import Response

from sylvan.api.extras import unknown_fields
from sylvan.api.native import GenerateBody
from sylvan.api.validation import WireModel, parse
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.native.health import health
from sylvan.runtime.server.streaming import cancel_on_disconnect
from sylvan.runtime.serving.native import NativeCall

ping = health


class VertexBody(WireModel):
    """Prompts, and parameters common to all."""

    instances: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1024)]
    """Prompts: objects with `text` or `input_ids`."""
    parameters: dict[str, Any] | None = None
    """Further fields of `/generate`, such as `sampling_params`."""


class VertexReply(BaseModel):
    """One answer for each prompt."""

    predictions: list[Any]


async def vertex_generate(call: Call[VertexBody]) -> Response:
    """Generate for a batch of prompts."""
    service, tenant = call.context.service, call.tenant.name
    jobs = [NativeCall(service, body, tenant) for body in _bodies(call)]
    total, limit = sum(job.num_samples for job in jobs), call.context.limits.max_samples
    if total > limit:
        message = f"instances: {total} samples are more than {limit} (limits.samples)."
        raise RequestError(message, param="instances", setting="limits.samples")
    return json_response({"predictions": await cancel_on_disconnect(call.request, _all(jobs))})


async def _all(jobs: list[NativeCall]) -> list[Any]:
    """Await all jobs; if one fails, cancel the others."""
    tasks = [asyncio.create_task(job.whole()) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _bodies(call: Call[VertexBody]) -> list[GenerateBody]:
    """Return the instances, with the common parameters as defaults."""
    instances = call.body.instances
    given = call.body.parameters or {}
    if not isinstance(given.get("stream", False), bool | None):
        message = "parameters.stream: expected true or false; answers come whole either way."
        raise RequestError(message, param="parameters.stream")
    parameters = {**given, "stream": False}
    size, limit = len(orjson.dumps(parameters)), call.context.settings.limits.parameter_bytes
    if size * len(instances) > limit:
        message = (
            f"parameters: {size} bytes for each of {len(instances)} instances are more than "
            f"{limit} (limits.parameter_bytes)."
        )
        raise RequestError(message, param="parameters", setting="limits.parameter_bytes")
    shared = _part(parameters, "parameters")
    bodies: list[GenerateBody] = []
    for i, instance in enumerate(instances):
        own = _part({**instance, "stream": False}, f"instances[{i}]")
        given = {name: getattr(own, name) for name in own.model_fields_set}
        bodies.append(shared.model_copy(update=given))
        call.ignored.extend(unknown_fields(own))
    call.ignored.extend(unknown_fields(shared))
    return bodies


def _part(fields: dict[str, Any], place: str) -> GenerateBody:
    try:
        return parse(GenerateBody, fields)
    except RequestError as error:
        path = f"{place}.{error.param}" if error.param else place
        raise RequestError(f"{place}: {error}", param=path) from error
