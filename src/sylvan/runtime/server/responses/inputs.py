"""The input of a response: its items, and its token count."""

from __future__ import annotations

from starlette.responses import Response

from sylvan.api.openai.items import input_item, page
from sylvan.api.openai.responses import InputItemsQuery, ResponsesBody
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.responses.create import ResponseJob, find_stored
from sylvan.runtime.serving.conversation import render


async def input_items(call: Call[None]) -> Response:
    """List the items that led to a stored response, newest first."""
    query: InputItemsQuery = call.query
    stored = find_stored(call, call.request.path_params["response_id"], None)
    items = [input_item(i, item, stored.reply["id"]) for i, item in enumerate(stored.items)]
    return json_response(page(items, query))


async def input_tokens(call: Call[ResponsesBody]) -> Response:
    """Count the tokens of an input, including instructions and tools."""
    prompt = await render(call.context.service, ResponseJob(call).conversation)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.input_ids)})
