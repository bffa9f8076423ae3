"""`/v1/responses`: create, store, continue, read and cancel responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from sylvan.api.answering import ToolUse, thinking_variables
from sylvan.api.client_fields import with_client_field
from sylvan.api.errors import Family, error_body
from sylvan.api.native import join_salt
from sylvan.api.openai.response_tools import ResponsesChoice, offered_tools
from sylvan.api.openai.responses import (
    AllowedTools,
    ResponsesBody,
    chat_messages,
    conversation_of,
    input_items,
    text_fields,
    text_schema,
)
from sylvan.api.request_fields import request_options, sampling_values
from sylvan.api.sampling import read_sampling
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.adapters import asked_adapter
from sylvan.runtime.server.endpoint import (
    INTERNAL_ERROR,
    Call,
    NotFoundError,
    error_code,
    error_parts,
    json_response,
)
from sylvan.runtime.server.responses import conversations
from sylvan.runtime.server.responses.items import ItemEvents, ItemStyle, Numbered, output_items
from sylvan.runtime.server.responses.truncation import fitted
from sylvan.runtime.server.stores.responses import StoredResponse
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.answers import AnswerRun, TextLog
from sylvan.runtime.serving.conversation import (
    Conversation,
    RequestFacts,
)
from sylvan.text.output import TextDelta
from sylvan.utils.tasks import settled

log = logging.getLogger(__name__)


async def create(call: Call[ResponsesBody]) -> Response:
    """Create a response."""
    job = ResponseJob(call)
    if call.body.background:
        return json_response(job.start())
    if call.body.stream:
        chunks = await await_first_chunk(call.request, job.events(), job.error_event)
        return EventStream(chunks)
    return json_response(await cancel_on_disconnect(call.request, job.run()))


async def retrieve(call: Call[None]) -> Response:
    """Return a stored response."""
    return json_response(_stored(call).reply)


async def cancel(call: Call[None]) -> Response:
    """Cancel a background response."""
    stored = _stored(call)
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)
        call.context.responses.change(stored, {"status": "cancelled"})
    return json_response(stored.reply)


async def delete(call: Call[None]) -> Response:
    """Delete a stored response."""
    stored = _stored(call)
    if stored.task is not None:
        stored.task.cancel()
    call.context.responses.drop(stored)
    return json_response({"id": stored.name, "object": "response", "deleted": True})


def _stored(call: Call[None]) -> StoredResponse:
    name = call.request.path_params["response_id"]
    return find_stored(call, name, None)


def find_stored(call: Call[Any], name: str, param: str | None) -> StoredResponse:
    """Return the tenant's stored response with an ID.

    Raises:
        RequestError: The ID is malformed, or the tenant has no such response.
    """
    if not name.startswith("resp_"):
        message = f"{param or 'response_id'}: {name[:80]!r} is not an id of a response (resp_...)."
        raise RequestError(message, param=param or "response_id")
    found = call.context.responses.get(name, call.tenant.name)
    if found is None:
        message = f"There is no stored response {name[:80]!r}."
        raise NotFoundError(message, param=param, code="response_not_found")
    return found


class ResponseJob:
    """One response in progress.

    Attributes:
        conversation: The conversation to answer.
    """

    def __init__(self, call: Call[ResponsesBody]) -> None:
        self._call, self._body, self._context = call, call.body, call.context
        body = call.body
        items: list[dict[str, Any]] = []
        if body.previous_response_id:
            earlier = find_stored(call, body.previous_response_id, "previous_response_id")
            items = [*earlier.items, *earlier.reply["output"]]
        self._spoken = conversation_of(body)
        if self._spoken is not None:
            if body.previous_response_id:
                message = "conversation: it excludes previous_response_id."
                raise RequestError(message, param="conversation")
            items = conversations.find(call, self._spoken, "conversation").items
        self._items = [*items, *input_items(body)]
        store = call.context.responses
        self._keep = body.store is not False and store.enabled
        if body.background and not self._keep:
            raise RequestError("background: true needs store: true.", param="background")
        call.names.update(text_fields(body))
        self._id = body.request_id or f"resp_{call.context.ids(16)}"
        self._created = int(call.context.wall())
        self._offered = offered_tools(body.tools or ())
        call.ignored.extend(self._offered.left_out)
        include = body.include or ()
        self._style = ItemStyle(self._offered.origins, "reasoning.encrypted_content" in include)
        self._logprobs = self._wanted_logprobs()
        self.conversation = self._conversation()
        self._turn = AnswerRun(call.context.service, self.conversation, call.names)

    async def _fit(self) -> None:
        """Drop the oldest turns, if the client prefers that to an error."""
        if self._body.truncation == "auto":
            service = self._context.service
            self.conversation = await fitted(service, self.conversation)
            self._turn = AnswerRun(service, self.conversation, self._call.names)

    def start(self) -> dict[str, Any]:
        """Start generating in the background."""
        reply = self._reply("queued", [], None)
        stored = self._context.responses.put(self._call.tenant.name, reply, self._items)
        stored.task = asyncio.create_task(self._in_background(stored))
        return reply

    async def _in_background(self, stored: StoredResponse) -> None:
        store = self._context.responses
        store.change(stored, {"status": "in_progress"})
        outcome = await settled(self.run())
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, SylvanError):
                log.error("response failed id=%s", self._id, exc_info=outcome)
            outcome = self._failed(outcome)
        store.change(stored, outcome)

    async def run(self) -> dict[str, Any]:
        """Return the complete response."""
        await self._fit()
        [finished] = await self._turn.whole()
        status = _status(finished.finish)
        logprobs = await self._turn.text_logprobs(finished)
        items = output_items(finished.answer, status, self._style, logprobs)
        usage = _usage(finished.usage, finished.reasoning_tokens)
        reply = self._reply(status, items, usage)
        self._put(reply)
        return reply

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as events."""
        numbered = self._numbered = Numbered()
        items = ItemEvents(numbered, self._style, self._context.ids)
        started = False
        await self._fit()
        log = TextLog(self._turn.log(await self._turn.prepared()))
        async with aclosing(self._turn.updates()) as steps:
            async for step in steps:
                chunks: list[bytes] = []
                if not started:
                    started = True
                    for kind in ("created", "in_progress"):
                        reply = self._reply("in_progress", [], None)
                        chunks.append(numbered.event(f"response.{kind}", response=reply))
                fresh = log.add(step)
                for piece in step.pieces:
                    chunks += items.add(piece, fresh)
                    fresh = [] if isinstance(piece, TextDelta) else fresh
                if step.finish is not None:
                    status = _status(step.finish)
                    chunks += items.end(status)
                    usage = _usage(step.usage, step.reasoning_tokens)
                    reply = self._reply(status, items.done, usage)
                    self._put(reply)
                    chunks.append(numbered.event(f"response.{status}", response=reply))
                if chunks:
                    yield b"".join(chunks)

    def error_event(self, error: SylvanError) -> bytes:
        """Return the last event of a failed stream."""
        return self._numbered.event("response.failed", response=self._failed(error))

    def _failed(self, error: BaseException) -> dict[str, Any]:
        status, message, code = 500, INTERNAL_ERROR, None
        if isinstance(error, SylvanError):
            error = with_client_field(error, self._call.names)
            status, message, _ = error_parts(error)
            code = error_code(error)
        detail = error_body(Family.RESPONSES, status, message, code=code)["error"]
        reply = self._reply("failed", [], None)
        reply["error"] = {"code": detail["code"] or detail["type"], "message": message}
        return reply

    def _wanted_logprobs(self) -> LogprobOptions | None:
        body, limit = self._body, self._context.limits.max_top_logprobs
        top = body.top_logprobs or 0
        if top > limit:
            raise RequestError(f"top_logprobs: expected at most {limit}.", param="top_logprobs")
        wanted = "message.output_text.logprobs" in (body.include or ())
        return LogprobOptions(top=top) if wanted or top else None

    def _put(self, reply: dict[str, Any]) -> None:
        if self._spoken is not None:
            said = [*input_items(self._body), *reply["output"]]
            conversations.extend(self._call, self._spoken, said)
        if self._keep and not self._body.background:
            self._context.responses.put(self._call.tenant.name, reply, self._items)

    def _conversation(self) -> Conversation:
        body = self._body
        effort = body.reasoning.effort if body.reasoning else None
        return Conversation(
            messages=chat_messages(self._items, body.instructions),
            sampling=self._sampling(),
            tool_use=self._tool_use(),
            variables={
                **thinking_variables(effort=effort),
                **(body.chat_template_kwargs or {}),
            },
            thinking_budget=body.reasoning.budget_tokens if body.reasoning else None,
            request=RequestFacts(
                rid=self._id,
                stream=bool(body.stream),
                tenant=self._call.tenant.name,
                logprobs=self._logprobs,
                lora=asked_adapter(self._call, body.model),
                cache_salt=join_salt(body.extra_key, body.cache_salt),
                options=request_options(body),
            ),
        )

    def _sampling(self) -> SamplingParams:
        body, defaults = self._body, self._context.defaults
        params = sampling_values(body)
        params["max_new_tokens"] = body.max_output_tokens
        params["json_schema"] = text_schema(body)
        names = {"max_new_tokens": "max_output_tokens", **text_fields(body)}
        return read_sampling(params, {**defaults.model, **defaults.preferred}, "", names)

    def _tool_use(self) -> ToolUse:
        choice, offered = self._body.tool_choice or "auto", self._offered
        if isinstance(choice, AllowedTools):
            path = "tool_choice.tools"
            named = [tool for tool in choice.tools if tool.type in ("function", "custom")]
            offered = offered.only({offered.name_of(tool, path) for tool in named})
            choice = choice.mode
        elif isinstance(choice, ResponsesChoice) and offered.tools:
            choice = offered.name_of(choice, "tool_choice")
        if choice not in ("auto", "none") and not offered.tools:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        parallel = self._body.parallel_tool_calls is not False
        return ToolUse(tools=offered.tools, choice=str(choice), parallel=parallel)

    def _reply(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        body, settings = self._body, self._context.settings
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice: Any = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "conversation": {"id": self._spoken} if self._spoken else None,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model or settings.served_model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "service_tier": "auto",
            "store": self._keep,
            "temperature": body.temperature,
            "text": _json_or_none(body.text) or {"format": {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else _json_or_none(choice),
            "tools": [_json_or_none(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "max_tool_calls": body.max_tool_calls,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }


def _json_or_none(model: Any) -> Any:
    return None if model is None else model.model_dump(by_alias=True, exclude_none=True)


def _status(finish: Finish) -> str:
    return "incomplete" if finish.type == "length" else "completed"


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
