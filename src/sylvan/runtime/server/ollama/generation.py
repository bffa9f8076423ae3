"""`/api/chat` and `/api/generate`."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from sylvan.api.answering import ToolUse, thinking_variables
from sylvan.api.errors import Family, error_body
from sylvan.api.media import with_images
from sylvan.api.ollama import (
    DEFAULT_NUM_PREDICT,
    OllamaBody,
    OllamaChatBody,
    OllamaFunction,
    OllamaGenerateBody,
    OllamaMessage,
)
from sylvan.api.sampling import OBJECT_SCHEMA, read_sampling
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.adapters import asked_adapter
from sylvan.runtime.server.endpoint import Call, error_parts, json_response
from sylvan.runtime.server.ollama.models import timestamp
from sylvan.runtime.server.ollama.options import OPTIONS, check_options, option_fields
from sylvan.runtime.server.sse import line
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.answers import AnswerRun, TextLog
from sylvan.runtime.serving.conversation import (
    Conversation,
    RequestFacts,
)
from sylvan.text.fim import FIM_UNSUPPORTED, Infill
from sylvan.text.output import ParsedOutput, ReasoningDelta, TextDelta
from sylvan.utils.threads import call_in_thread


async def chat(call: Call[OllamaChatBody]) -> Response:
    """Generate a chat answer."""
    body = call.body
    if not body.messages:
        return _loaded(call, {"message": {"role": "assistant", "content": ""}})
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    tools = ToolUse(tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()])
    return await _answer(call, _Form(call, chat=True), _conversation(call, messages, tools))


async def generate(call: Call[OllamaGenerateBody]) -> Response:
    """Generate from a prompt, with the template or raw."""
    body = call.body
    _refuse(body)
    if not body.prompt:
        return _loaded(call, {"response": ""})
    if body.suffix:
        infill = Infill(call.context.engine.tokenizer)
        if not infill:
            raise RequestError(FIM_UNSUPPORTED, param="suffix")
        ids = await call_in_thread(infill.encode, body.prompt, body.suffix)
        conversation = _conversation(call, [], ToolUse(), ids)
    elif body.raw:
        ids = await call.context.engine.tokenize(body.prompt)
        conversation = _conversation(call, [], ToolUse(), ids)
    else:
        content = with_images(body.prompt, body.images or (), "images")
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        conversation = _conversation(call, messages, ToolUse())
    return await _answer(call, _Form(call, chat=False), conversation)


def _refuse(body: OllamaGenerateBody) -> None:
    reasons = {
        "template": "use the model's own template, or raw",
        "context": "send the conversation to /api/chat",
    }
    for name, reason in reasons.items():
        if getattr(body, name):
            raise RequestError(f"{name} is not supported: {reason}.", param=name)


def _message(i: int, message: OllamaMessage) -> dict[str, Any]:
    content = with_images(message.content or "", message.images or (), f"messages[{i}].images")
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_name:
        made["name"] = message.tool_name
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": c.function.name, "arguments": _arguments(c.function)},
            }
            for c in message.tool_calls
        ]
    return made


def _arguments(function: OllamaFunction) -> str:
    arguments = function.arguments or {}
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _conversation(
    call: Call[Any],
    messages: list[dict[str, Any]],
    tool_use: ToolUse,
    input_ids: list[int] | None = None,
) -> Conversation:
    body: OllamaBody = call.body
    effort = body.think if isinstance(body.think, str) else None
    enabled = body.think if isinstance(body.think, bool) else None
    return Conversation(
        messages=messages,
        sampling=_sampling(call),
        tool_use=tool_use,
        variables=thinking_variables(effort=effort, enabled=enabled),
        input_ids=input_ids,
        request=RequestFacts(
            rid=secrets.token_hex(16),
            stream=body.stream is not False,
            tenant=call.tenant.name,
            logprobs=_logprobs(body),
            lora=asked_adapter(call, body.model),
        ),
    )


def _logprobs(body: OllamaBody) -> LogprobOptions | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return LogprobOptions(top=body.top_logprobs or 0) if body.logprobs else None


def _sampling(call: Call[Any]) -> SamplingParams:
    body: OllamaBody = call.body
    params: dict[str, Any] = {"max_new_tokens": None}
    call.ignored.extend(check_options(body.options))
    for name, value in (body.options or {}).items():
        if name == "num_predict":
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError("options.num_predict must be an integer.", param="options")
            params["max_new_tokens"] = value if value >= 0 else None
        elif name in OPTIONS:
            params[OPTIONS[name]] = value
    if params.get("top_k") == 0:
        params["top_k"] = None
    if body.format:
        params["json_schema"] = OBJECT_SCHEMA if body.format == "json" else json.dumps(body.format)
    defaults = call.context.defaults
    names = {**option_fields(), "max_new_tokens": "options.num_predict", "json_schema": "format"}
    return read_sampling(params, {**defaults.model, **defaults.preferred}, "options", names)


async def _answer(call: Call[Any], form: _Form, conversation: Conversation) -> Response:
    turn = AnswerRun(call.context.service, conversation, call.names, DEFAULT_NUM_PREDICT)
    if call.body.stream is not False:
        chunks = await await_first_chunk(call.request, _lines(form, turn), _error_line)
        return EventStream(chunks, "application/x-ndjson")
    [finished] = await cancel_on_disconnect(call.request, turn.whole())
    content = form.content(finished.answer, await turn.text_logprobs(finished))
    return json_response({**content, **form.end(finished.usage, finished.finish)})


async def _lines(form: _Form, turn: AnswerRun) -> AsyncGenerator[bytes, None]:
    calls = ParsedOutput()
    fresh: list[dict[str, Any]] = []
    log = TextLog(turn.log(await turn.prepared()))
    async with aclosing(turn.updates()) as steps:
        async for step in steps:
            chunk = b""
            fresh += log.add(step)  # some become visible later, with text that is held back
            for piece in step.pieces:
                new = ParsedOutput()
                if isinstance(piece, TextDelta | ReasoningDelta):
                    new.add([piece])
                    ready, fresh = (fresh, []) if isinstance(piece, TextDelta) else ([], fresh)
                    chunk += line({**form.head(), **form.content(new, ready), "done": False})
                else:
                    calls.add([piece])
            if step.finish is not None:
                if calls.calls:
                    chunk += line({**form.head(), **form.content(calls), "done": False})
                end = form.end(step.usage, step.finish)
                chunk += line({**form.content(ParsedOutput(), fresh), **end})
            if chunk:
                yield chunk


class _Form:
    """The answer format of one of the two routes."""

    def __init__(self, call: Call[Any], *, chat: bool) -> None:
        self._context = call.context
        self._model = call.body.model
        self._chat = chat
        self._began = call.context.clock()

    def head(self) -> dict[str, Any]:
        """Return the fields common to all lines."""
        return {"model": self._model, "created_at": timestamp(self._context.wall())}

    def content(
        self, answer: ParsedOutput, logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return text, thinking and calls, and log probabilities of the text."""
        extra = {"logprobs": list(logprobs)} if logprobs else {}
        if not self._chat:
            content: dict[str, Any] = {"response": answer.text, **extra}
            return {**content, "thinking": answer.reasoning} if answer.reasoning else content
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["thinking"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"function": {"name": c.name, "arguments": _object(c.arguments)}}
                for c in answer.calls
            ]
        return {"message": message, **extra}

    def end(self, usage: Usage, finish: Finish) -> dict[str, Any]:
        """Return the fields of the last line: counts, and durations in nanoseconds."""
        total = int((self._context.clock() - self._began) * 1e9)
        return {
            **self.head(),
            "done": True,
            "done_reason": finish.type,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": 0,
            "eval_count": usage.completion_tokens,
            "eval_duration": total,
        }


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _loaded(call: Call[Any], content: dict[str, Any]) -> Response:
    """Answer an empty prompt, which asks to load the model: it is loaded."""
    form = _Form(call, chat="message" in content)
    return json_response({**form.head(), **content, "done": True, "done_reason": "load"})


def _error_line(error: SylvanError) -> bytes:
    status, message, _ = error_parts(error)
    return line(error_body(Family.OLLAMA, status, message))
