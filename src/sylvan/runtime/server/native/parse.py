"""`/parse_function_call` and `/separate_reasoning`: output parsers as routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from sylvan.api.tools import ParseCallsBody, SeparateBody
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.native.tokens import check_chars
from sylvan.text import reasoning, tools
from sylvan.text.tools import ToolSpec
from sylvan.utils.threads import call_in_thread


async def parse_function_call(call: Call[ParseCallsBody]) -> Response:
    """Extract tool calls from a text."""
    body = call.body
    own = call.context.parsers.tools
    template = call.context.engine.tokenizer.chat_template or ""
    with _asked_for("tool_call_parser"):
        name = body.tool_call_parser
        family = own if name is None else tools.family(name, chat_template=template)
        if family is None:
            raise ConfigError("tool_call_parser must be given: this model has none.")
    names = [tool.function.name for tool in body.tools]
    specs = ToolSpec.from_openai([tool.model_dump(exclude_none=True) for tool in body.tools])
    check_chars(call, len(body.text), "text")
    found = await call_in_thread(tools.parse, body.text, family.grammar, specs)
    calls = [
        {"tool_index": names.index(c.name), "name": c.name, "parameters": c.arguments or "{}"}
        for c in found.calls
    ]
    return json_response({"normal_text": found.text, "calls": calls})


async def separate_reasoning(call: Call[SeparateBody]) -> Response:
    """Split a text into reasoning and answer."""
    body = call.body
    own, template = (
        call.context.parsers.reasoning,
        call.context.engine.tokenizer.chat_template or "",
    )
    with _asked_for("reasoning_parser"):
        name = body.reasoning_parser
        family = own if name is None else reasoning.family(name, chat_template=template)
        if family is None:
            raise ConfigError("reasoning_parser must be given: this model has none.")
    start = family.starts_in_reasoning()
    check_chars(call, len(body.text), "text")
    thought, text = await call_in_thread(
        reasoning.separate, body.text, family, start_in_reasoning=start
    )
    reply: dict[str, Any] = {"reasoning_text": thought, "text": text}
    if body.return_blocks:
        blocks = [("reasoning", thought), ("text", text)]
        reply["reasoning_blocks"] = [thought] if thought else []
        reply["text_blocks"] = [text] if text else []
        reply["blocks"] = [{"type": kind, "text": part} for kind, part in blocks if part]
    return json_response(reply)


@contextmanager
def _asked_for(param: str) -> Iterator[None]:
    """Turn a configuration error into a request error: here the request chose the parser."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(str(error), param=param) from error
