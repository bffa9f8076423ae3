"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from sylvan.api.answering import ToolUse, thinking_variables
from sylvan.api.anthropic import (
    CountBody,
    MessagesBody,
    check_thinking,
    openai_messages,
    openai_tools,
)
from sylvan.api.errors import Family, error_body
from sylvan.api.request_fields import request_options
from sylvan.api.sampling import read_sampling
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.adapters import asked_adapter
from sylvan.runtime.server.anthropic.documents import draw_documents
from sylvan.runtime.server.endpoint import Call, error_parts, json_response
from sylvan.runtime.server.sse import named_event
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.answers import AnswerRun, FinishedAnswer
from sylvan.runtime.serving.conversation import (
    Conversation,
    RequestFacts,
    render,
)
from sylvan.text.output import CallStart, CallText, Piece, ReasoningDelta, TextDelta

Ids = Callable[[int], str]
_STOPS = {"length": "max_tokens", "stop": "end_turn", "abort": "end_turn"}


async def messages(call: Call[MessagesBody]) -> Response:
    """Create a message."""
    await draw_documents(call.body, call.context.engine)
    asked = _conversation(call, _sampling(call), call.body.rid, bool(call.body.stream))
    turn = AnswerRun(call.context.service, asked, call.names)
    if call.body.stream:
        chunks = await await_first_chunk(call.request, _events(call, turn), _error_event)
        return EventStream(chunks)
    [finished] = await cancel_on_disconnect(call.request, turn.whole())
    return json_response(_message(call, finished))


async def count_tokens(call: Call[CountBody]) -> Response:
    """Count the tokens of a conversation."""
    await draw_documents(call.body, call.context.engine)
    if call.body.output_config is not None and call.body.output_config.format is not None:
        call.ignored.append("output_config.format")
    prompt = await render(
        call.context.service, _conversation(call, SamplingParams(), None, stream=False)
    )
    return json_response({"input_tokens": len(prompt.input_ids)})


def _conversation(
    call: Call[Any], sampling: SamplingParams, rid: str | None, stream: bool
) -> Conversation:
    body: CountBody = call.body
    check_thinking(body.thinking)
    enabled = None if body.thinking is None else body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config else None
    return Conversation(
        messages=openai_messages(body),
        sampling=sampling,
        tool_use=_tool_use(call),
        variables=thinking_variables(effort=effort, enabled=enabled),
        thinking_budget=body.thinking.budget_tokens if enabled and body.thinking else None,
        request=RequestFacts(
            rid=rid or call.context.ids(16),
            stream=stream,
            tenant=call.tenant.name,
            lora=asked_adapter(call, body.model),
            options=request_options(body),
        ),
    )


def _sampling(call: Call[MessagesBody]) -> SamplingParams:
    body, defaults = call.body, call.context.defaults
    params: dict[str, Any] = {
        "max_new_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
    }
    if body.output_config is not None and body.output_config.format is not None:
        params["json_schema"] = json.dumps(body.output_config.format.schema_)
    names = {"stop": "stop_sequences", "max_new_tokens": "max_tokens"}
    return read_sampling(params, {**defaults.model, **defaults.preferred}, "", names)


def _tool_use(call: Call[Any]) -> ToolUse:
    body: CountBody = call.body
    tools, left_out = openai_tools(body)
    choice = body.tool_choice
    call.ignored.extend(left_out)
    if choice is None:
        return ToolUse(tools=tools)
    name = {"auto": "auto", "none": "none", "any": "required"}.get(choice.type, choice.name)
    if name is None:
        raise RequestError("tool_choice.name must be given.", param="tool_choice.name")
    if name not in ("auto", "none") and not tools:
        raise RequestError("tool_choice needs tools.", param="tool_choice")
    return ToolUse(tools=tools, choice=name, parallel=not choice.disable_parallel_tool_use)


def _message(call: Call[MessagesBody], finished: FinishedAnswer) -> dict[str, Any]:
    answer = finished.answer
    content = [_block(part, call.context.ids) for part in answer.parts or [TextDelta("")]]
    stop, sequence = _stop(finished.finish, calls=bool(answer.calls))
    return {
        **_empty_message(call),
        "content": content,
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": _usage(finished.usage),
    }


def _block(part: ReasoningDelta | TextDelta | CallText, ids: Ids) -> dict[str, Any]:
    if isinstance(part, ReasoningDelta):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if isinstance(part, TextDelta):
        return {"type": "text", "text": part.text}
    given = _arguments(part.arguments)
    return {"type": "tool_use", "id": f"toolu_{ids(12)}", "name": part.name, "input": given}


def _arguments(text: str) -> Any:
    """Parse arguments into an object; truncated JSON is parsed as far as possible."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {"partial_json": text}
    return value if isinstance(value, dict) else {"value": value}


async def _events(call: Call[MessagesBody], turn: AnswerRun) -> AsyncGenerator[bytes, None]:
    blocks = _Blocks(call.context.ids)
    started = False
    async with aclosing(turn.updates()) as steps:
        async for step in steps:
            chunks: list[bytes] = []
            if not started:
                started = True
                usage = {**_usage(step.usage), "output_tokens": 0}
                message = {**_empty_message(call), "usage": usage}
                start = {"type": "message_start", "message": message}
                chunks.append(named_event("message_start", start))
                chunks.append(named_event("ping", {"type": "ping"}))
            for piece in step.pieces:
                chunks += blocks.add(piece)
            if step.finish is not None:
                chunks += blocks.end()
                stop, sequence = _stop(step.finish, calls=blocks.has_calls)
                delta = {"stop_reason": stop, "stop_sequence": sequence}
                end = {"type": "message_delta", "delta": delta, "usage": _usage(step.usage)}
                chunks.append(named_event("message_delta", end))
                chunks.append(named_event("message_stop", {"type": "message_stop"}))
            if chunks:
                yield b"".join(chunks)


class _Blocks:
    """Content blocks of a stream: at most one is open, numbered from 0."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._index = -1
        self._open: str | None = None
        self.has_calls = False

    def add(self, piece: Piece) -> Iterator[bytes]:
        """Return the events for a piece; start a new block if the open one is of another type."""
        if isinstance(piece, TextDelta):
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})
        elif isinstance(piece, ReasoningDelta):
            start = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._switch("thinking", start)
            yield self._delta({"type": "thinking_delta", "thinking": piece.text})
        elif isinstance(piece, CallStart):
            self.has_calls = True
            name = f"toolu_{self._ids(12)}"  # each call starts once
            start = {"type": "tool_use", "id": name, "name": piece.name, "input": {}}
            yield from self._switch(f"call {piece.index}", start)
        else:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.fragment})

    def end(self) -> Iterator[bytes]:
        """Return the events that end the last block; an answer without blocks gets an empty one."""
        if self._index < 0:
            yield from self._switch("text", {"type": "text", "text": ""})
        yield from self._close()

    def _switch(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield named_event("content_block_start", start)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._open = None
        stop = {"type": "content_block_stop", "index": self._index}
        yield named_event("content_block_stop", stop)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        content = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", content)


def _empty_message(call: Call[MessagesBody]) -> dict[str, Any]:
    return {
        "id": f"msg_{call.context.ids(12)}",
        "type": "message",
        "role": "assistant",
        "model": call.body.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _stop(finish: Finish, *, calls: bool) -> tuple[str, str | None]:
    if calls and finish.type == "stop":
        return "tool_use", None
    if finish.type == "stop" and isinstance(finish.matched, str):
        return "stop_sequence", finish.matched
    return _STOPS[finish.type], None


def _error_event(error: SylvanError) -> bytes:
    status, message, _ = error_parts(error)
    return named_event("error", error_body(Family.ANTHROPIC, status, message))
