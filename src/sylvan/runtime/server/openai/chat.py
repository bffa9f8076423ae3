"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from sylvan.api.answering import thinking_variables
from sylvan.api.openai.chat import ChatBody, continues_message, template_messages
from sylvan.api.openai.chat_logprobs import ChatLogprobs
from sylvan.api.openai.chat_tools import tool_use
from sylvan.api.openai.common import (
    adapter_fields,
    grammar_fields,
    openai_sampling,
    salt_of,
)
from sylvan.api.request_fields import request_options
from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.adapters import adapter_of
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.openai.chat_calls import call_id, finish_name, tool_calls
from sylvan.runtime.server.openai.completions import openai_error_event
from sylvan.runtime.server.openai.meta import meta_info, weight_metadata
from sylvan.runtime.server.openai.sglext import ResponseExtras
from sylvan.runtime.server.openai.usage import UsageCounter, model_name, stream_usage
from sylvan.runtime.server.sse import DONE, PLACEHOLDER, EventTemplate, event
from sylvan.runtime.server.streaming import EventStream, await_first_chunk, cancel_on_disconnect
from sylvan.runtime.serving.answers import AnswerRun, FinishedAnswer, Update
from sylvan.runtime.serving.conversation import Conversation, Prepared, RequestFacts, render
from sylvan.runtime.serving.samples import Sample
from sylvan.runtime.tokenizer.types import SampleDelta
from sylvan.text.output import CallStart, Piece, ReasoningDelta, TextDelta


async def chat(call: Call[ChatBody]) -> Response:
    """Create a chat completion."""
    job = _ChatCall(call)
    if call.body.stream:
        chunks = await await_first_chunk(call.request, job.events(), openai_error_event)
        return EventStream(chunks)
    return json_response(await cancel_on_disconnect(call.request, job.reply()))


async def render_chat(call: Call[ChatBody]) -> Response:
    """Render a conversation as a prompt, without generating."""
    prompt = await render(call.context.service, conversation_of(call))
    ids = prompt.input_ids
    text = prompt.text or call.context.engine.tokenizer.decode(ids, skip_special_tokens=False)
    length = call.context.engine.facts.context_len
    return json_response(
        {"text": text, "input_ids": ids, "count": len(ids), "max_model_len": length}
    )


def conversation_of(call: Call[ChatBody]) -> Conversation:
    """Convert the body to the API-independent form.

    Raises:
        RequestError: A field is invalid; the message names it and its limit.
    """
    body, context = call.body, call.context
    call.names.update(adapter_fields(body))
    if body.input_ids is not None:
        call.names["input_ids"] = "input_ids"
    if body.max_completion_tokens is not None:
        call.names["max_new_tokens"] = "max_completion_tokens"
    continued = continues_message(body)
    start = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    switch = body.enable_thinking
    if body.thinking is not None and body.thinking.type != "adaptive":
        switch = body.thinking.type == "enabled"
    return Conversation(
        messages=template_messages(body.messages),
        sampling=_sampling(body, context),
        tool_use=tool_use(body),
        variables={
            **thinking_variables(effort=body.reasoning_effort, enabled=switch),
            **(body.chat_template_kwargs or {}),
        },
        template=body.chat_template,
        add_generation_prompt=start,
        continue_final=continued,
        separate_reasoning=body.separate_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
        thinking_budget=_thinking_budget(body),
        input_ids=body.input_ids,
        request=RequestFacts(
            rid=body.rid or context.ids(16),
            stream=bool(body.stream),
            tenant=call.tenant.name,
            logprobs=_logprobs(body, context),
            lora=adapter_of(call, body),
            cache_salt=salt_of(body),
            options=request_options(body),
        ),
    )


def _thinking_budget(body: ChatBody) -> int | None:
    """Return the smallest of the given budgets."""
    switch = body.thinking.budget_tokens if body.thinking else None
    given = (body.thinking_budget, body.max_thinking_tokens, switch)
    return min((budget for budget in given if budget is not None), default=None)


def _sampling(body: ChatBody, context: Context) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return openai_sampling(body, context.defaults, limit, name)


def _logprobs(body: ChatBody, context: Context) -> LogprobOptions | None:
    limit = context.limits.max_top_logprobs
    top = body.top_logprobs or 0
    if top > limit:
        raise RequestError(f"top_logprobs: expected at most {limit}.", param="top_logprobs")
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return LogprobOptions(top=top) if body.logprobs else None


class _ChatCall:
    """One call in progress."""

    def __init__(self, call: Call[ChatBody]) -> None:
        self._context, self._body = call.context, call.body
        conversation = conversation_of(call)
        call.names.update(grammar_fields(self._body))
        self._run = AnswerRun(call.context.service, conversation, call.names)
        self._n = conversation.sampling.n
        self._began_s = call.context.clock()
        self._usage_counter = UsageCounter(call, 1, self._n)
        self._extras = ResponseExtras(call)
        self._frame: dict[str, Any] = {
            "id": conversation.request.rid,
            "object": "chat.completion.chunk" if call.body.stream else "chat.completion",
            "created": int(call.context.wall()),
            "model": model_name(call.context, call.body),
        }

    async def reply(self) -> dict[str, Any]:
        """Return the answer of a call without streaming."""
        prepared = await self._run.prepared()
        self._extras.add_prompt(prepared.prompt.input_ids)
        finished_samples = await self._run.whole()
        choices = []
        for i, finished in enumerate(finished_samples):
            self._usage_counter.update(0, finished.sample.last_delta(i))
            self._usage_counter.set_reasoning(i, finished.reasoning_tokens)
            self._extras.add(i, finished.sample.token_ids, finished.usage)
            choices.append(self._choice(i, finished, prepared))
        usage = self._usage_counter.reply()
        made = (v for finished in finished_samples for v in finished.sample.weight_versions)
        metadata = weight_metadata(self._context, tuple(dict.fromkeys(made)))
        reply = {**self._frame, "choices": choices, "usage": usage, "metadata": metadata}
        return {**reply, **self._extras.reply()}

    def _choice(self, index: int, finished: FinishedAnswer, prepared: Prepared) -> dict[str, Any]:
        answer, sample = finished.answer, finished.sample
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "reasoning_content": answer.reasoning or None,
        }
        if answer.calls and self.is_legacy:
            [called] = answer.calls
            message["function_call"] = {"name": called.name, "arguments": called.arguments or "{}"}
        elif answer.calls:
            message["tool_calls"] = tool_calls(self._context, answer)
        log = self.log(prepared)
        choice = {
            "index": index,
            "message": message,
            "logprobs": log
            and log.reply(sample.token_ids, sample.logprobs, sample.text, answer.spans),
            "finish_reason": finish_name(
                sample.finish, calls=bool(answer.calls), is_legacy=self.is_legacy
            ),
            "matched_stop": finished.finish.matched,
        }
        if self._body.return_prompt_token_ids:
            choice["prompt_token_ids"] = prepared.prompt.input_ids
        if self._body.return_token_ids:
            choice["response_token_ids"] = sample.token_ids
        if self._body.return_meta_info:
            choice["meta_info"] = meta_info(
                self._context,
                sample,
                prepared.input.logprobs,
                reasoning_tokens=finished.reasoning_tokens,
                began_s=self._began_s,
            )
        return choice

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streaming call."""
        at_end, always = stream_usage(self._context, self._body.stream_options)
        prepared = await self._run.prepared()
        self._extras.add_prompt(prepared.prompt.input_ids)
        writers = [_Writer(self, i, prepared) for i in range(self._n)]
        started = False
        async with aclosing(self._run.updates()) as updates:
            async for update in updates:
                delta, index = update.delta, update.index
                self._usage_counter.update(0, delta)
                self._usage_counter.set_reasoning(index, update.reasoning_tokens)
                self._extras.add(index, delta.token_ids, delta.usage)
                chunk = writers[index].write(update, always)
                if chunk or not started:
                    started = True
                    yield chunk
        if extras := self._extras.reply():
            yield event({**self._frame, "choices": [], **extras})
        if at_end:
            yield event({**self._frame, "choices": [], "usage": self._usage_counter.reply()})
        yield DONE

    def chunk(
        self, index: int, delta: dict[str, Any], *, usage: bool, **fields: Any
    ) -> dict[str, Any]:
        """Build one chunk of a stream."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
            **fields,
        }
        frame = {**self._frame, "choices": [choice]}
        return {**frame, "usage": self._usage_counter.reply()} if usage else frame

    def log(self, prepared: Prepared) -> ChatLogprobs | None:
        """Make the recorder of a choice's `logprobs`, if requested."""
        if not self._body.logprobs:
            return None
        return self._run.log(prepared, every=bool(self._body.return_token_ids))

    def meta(self, last: SampleDelta, reasoning_tokens: int) -> dict[str, Any]:
        """Return the `meta_info` of a streamed choice, if requested; logprobs were already sent."""
        if not self._body.return_meta_info:
            return {}
        sample = Sample()
        sample.add(msgspec.structs.replace(last, logprobs=None))
        began_s, thought = self._began_s, reasoning_tokens
        found = meta_info(self._context, sample, None, reasoning_tokens=thought, began_s=began_s)
        return {"meta_info": found}

    @property
    def is_legacy(self) -> bool:
        """Whether calls use the legacy functions format instead of tools."""
        return self._body.functions is not None

    @property
    def context(self) -> Context:
        """The dependencies."""
        return self._context


class _Writer:
    """Builds the chunks of one choice: its role, deltas, and finish reason."""

    def __init__(self, job: _ChatCall, index: int, prepared: Prepared) -> None:
        self._job = job
        self._index = index
        self._log = job.log(prepared)
        self._answer = EventTemplate(job.chunk(index, _text_delta(PLACEHOLDER), usage=False))
        self._thinking = EventTemplate(job.chunk(index, _thinking_delta(PLACEHOLDER), usage=False))
        self._begun = False

    def write(self, update: Update, usage: bool) -> bytes:
        """Return the chunks for an update; empty if there is nothing to send."""
        pieces = update.pieces
        if self._begun and self._log is None and update.delta.finish is None and not usage:
            if not pieces:
                return b""
            [piece, *others] = pieces
            if not others and isinstance(piece, TextDelta):
                return self._answer.fill(piece.text)
            if not others and isinstance(piece, ReasoningDelta):
                return self._thinking.fill(piece.text)
        return b"".join(event(chunk) for chunk in self._chunks(update, usage))

    def _chunks(self, update: Update, usage: bool) -> Iterator[dict[str, Any]]:
        job, index, delta = self._job, self._index, update.delta
        if not self._begun:
            self._begun = True
            role = {"role": "assistant", **_text_delta("")}
            yield job.chunk(index, role, usage=usage)
        logprobs = self._logprobs(update)
        deltas = [self._delta(piece) for piece in update.pieces]
        if not deltas and logprobs and logprobs["content"]:
            deltas = [_text_delta("")]
        for content in deltas:
            yield job.chunk(index, content, usage=usage, logprobs=logprobs)
            logprobs = None
        if delta.finish is not None:
            reason = finish_name(delta.finish, calls=update.has_calls, is_legacy=job.is_legacy)
            matched = delta.finish.matched
            last = {"reasoning_content": None}  # clients read it from every delta
            end = job.chunk(index, last, usage=usage, finish_reason=reason, matched_stop=matched)
            end["choices"][0].update(job.meta(delta, update.reasoning_tokens))
            yield {**end, "metadata": weight_metadata(job.context, delta.weight_versions)}

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        if self._log is None:
            return None
        delta = update.delta
        parts = [] if delta.logprobs is None else [delta.logprobs]
        return self._log.reply(delta.token_ids, parts, delta.text, update.spans)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, ReasoningDelta):
            return _thinking_delta(piece.text)
        if isinstance(piece, TextDelta):
            return _text_delta(piece.text)
        starts = isinstance(piece, CallStart)
        name = {"name": piece.name} if starts else {}
        called = {**name, "arguments": "" if starts else piece.fragment}
        if self._job.is_legacy:
            return {"content": None, "reasoning_content": None, "function_call": called}
        call: dict[str, Any] = {"index": piece.index}
        if starts:
            call["id"] = call_id(self._job.context, piece.name, piece.index)
            call["type"] = "function"
        call["function"] = called
        return {"content": None, "reasoning_content": None, "tool_calls": [call]}


def _text_delta(text: str) -> dict[str, Any]:
    return {"content": text, "reasoning_content": None}


def _thinking_delta(text: str) -> dict[str, Any]:
    return {"content": None, "reasoning_content": text}
