"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.answering import thinking_variables
from sylvan.api.tokens import DetokenizeBody, TokenizeBody
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.serving.conversation import render_chat
from sylvan.text.chat_template import ChatRequest


async def tokenize(call: Call[TokenizeBody]) -> Response:
    """Tokenise a text, several texts, or a conversation."""
    body, engine = call.body, call.context.engine
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Exactly one of prompt and messages must be given.", param="prompt")
    tokens: Any
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or ()
    check_chars(call, sum(map(len, prompts)), "prompt")
    if body.messages is not None:
        tokens = await _conversation(call)
    elif isinstance(body.prompt, str):
        tokens = await engine.tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    else:
        special = body.add_special_tokens is not False
        tokens = [
            await engine.tokenize(text, add_special_tokens=special) for text in body.prompt or ()
        ]
    many = isinstance(body.prompt, list)
    count = [len(ids) for ids in tokens] if many else len(tokens)
    length = engine.facts.context_len
    return json_response({"tokens": tokens, "count": count, "max_model_len": length})


async def detokenize(call: Call[DetokenizeBody]) -> Response:
    """Decode token IDs."""
    body, engine = call.body, call.context.engine
    skip = body.skip_special_tokens is not False
    tokens: Any = body.tokens
    if tokens and isinstance(tokens[0], list):
        text: Any = [await engine.detokenize(ids, skip_special_tokens=skip) for ids in tokens]
    else:
        text = await engine.detokenize(tokens, skip_special_tokens=skip)
    return json_response({"text": text})


def check_chars(call: Call[Any], num_chars: int, field: str) -> None:
    """Reject texts that are too long for routes that only process text.

    Raises:
        RequestError: The text is too long (413); the message names the limit.
    """
    limit = call.context.settings.limits.text_chars
    if num_chars > limit:
        message = f"{field}: {num_chars} characters are more than limits.text_chars={limit}."
        raise RequestError(message, param=field, status=413, setting="limits.text_chars")


async def _conversation(call: Call[TokenizeBody]) -> list[int]:
    body = call.body
    going_on = bool(body.continue_final_message)
    start = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    request = ChatRequest(
        messages=body.messages or (),
        tools=tools if tools and body.tool_choice != "none" else None,
        add_generation_prompt=start,
        continue_final_message=going_on,
        kwargs=call.context.service.variables(
            {
                **thinking_variables(effort=body.reasoning_effort),
                **(body.chat_template_kwargs or {}),
            }
        ),
    )
    rendered = await render_chat(call.context.service, request)
    return rendered.input_ids
