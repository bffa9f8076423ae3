"""`/parse_function_call` and `/separate_reasoning`: the parsers of output, on their own."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.tools import ParseCallsBody, SeparateBody
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.text import reasoning, tools
from sylvan.text.tools import ToolSpec


async def parse_function_call(call: Call[ParseCallsBody]) -> Response:
    """Find the calls in a text."""
    body = call.body
    family = call.context.parsers.tools
    if body.tool_call_parser is not None:
        try:
            template = call.context.engine.tokenizer.chat_template or ""
            family = tools.family(body.tool_call_parser, chat_template=template)
        except ConfigError as error:
            raise RequestError(str(error), param="tool_call_parser") from error
    if family is None:
        message = "tool_call_parser must be given: this model has none."
        raise RequestError(message, param="tool_call_parser")
    names = [tool.function.name for tool in body.tools]
    specs = ToolSpec.from_openai([tool.model_dump(exclude_none=True) for tool in body.tools])
    found = tools.parse(body.text, family.grammar, specs)
    calls = [
        {"tool_index": names.index(c.name), "name": c.name, "parameters": c.arguments or "{}"}
        for c in found.calls
    ]
    return json_response({"normal_text": found.text, "calls": calls})


async def separate_reasoning(call: Call[SeparateBody]) -> Response:
    """Split a text into thinking and answer."""
    body = call.body
    family = call.context.parsers.reasoning
    if body.reasoning_parser is not None:
        try:
            template = call.context.engine.tokenizer.chat_template or ""
            family = reasoning.family(body.reasoning_parser, chat_template=template)
        except ConfigError as error:
            raise RequestError(str(error), param="reasoning_parser") from error
    if family is None:
        message = "reasoning_parser must be given: this model has none."
        raise RequestError(message, param="reasoning_parser")
    start = family.starts_in_reasoning()
    thought, text = reasoning.separate(body.text, family, start_in_reasoning=start)
    reply: dict[str, Any] = {"reasoning_text": thought, "text": text}
    if body.return_blocks:
        blocks = [("reasoning", thought), ("text", text)]
        reply["reasoning_blocks"] = [thought] if thought else []
        reply["text_blocks"] = [text] if text else []
        reply["blocks"] = [{"type": kind, "text": part} for kind, part in blocks if part]
    return json_response(reply)
