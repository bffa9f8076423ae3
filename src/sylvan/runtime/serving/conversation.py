"""Prepares a conversation of any API for the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import msgspec

from sylvan.api.answering import AnswerRequest, ToolUse, plan_answer
from sylvan.api.media import split_media
from sylvan.protocol.errors import ContextLengthError, RequestError
from sylvan.protocol.requests import LogprobOptions, RequestOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.serving.service import GenerationService
from sylvan.runtime.tokenizer.checks import MAX_CHARS_PER_TOKEN
from sylvan.runtime.tokenizer.types import GenerateInput
from sylvan.text.chat_template import ChatRequest, RenderedPrompt
from sylvan.text.output import OutputRules
from sylvan.text.reasoning.tokens import ending
from sylvan.utils.threads import call_in_thread

_PUNCTUATION = 4  # characters around a value
_MEDIA = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
INLINE_CHARS = 8192  # rendering and tokenising shorter ones takes under 2 ms


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Request attributes besides prompt and sampling."""

    rid: str
    stream: bool
    tenant: str = ""
    logprobs: LogprobOptions | None = None
    lora: str | None = None
    cache_salt: str = ""
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to answer, independent of the API.

    Attributes:
        messages: Messages in OpenAI's format.
        tool_use: Tools that may or must be called.
        sampling: Sampling parameters.
        variables: Variables of the chat template.
        template: Name of a chat template.
        add_generation_prompt: Start a new message.
        continue_final: Continue the last message instead.
        separate_reasoning: Return reasoning apart from the text.
        stream_reasoning: Stream reasoning as it arrives.
        thinking_budget: Tokens of reasoning after which it is forced to end.
        input_ids: Replaces the rendering of the messages.
        request: Other request attributes.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: SamplingParams
    tool_use: ToolUse = msgspec.field(default_factory=ToolUse)
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)
    template: str | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    thinking_budget: int | None = None
    input_ids: Sequence[int] | None = None
    request: RequestFacts


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as engine input.

    Attributes:
        input: Input of the engine.
        rules: How outputs are parsed.
        prompt: The rendered prompt.
    """

    input: GenerateInput
    rules: OutputRules
    prompt: RenderedPrompt

    def with_sampling(self, sampling: SamplingParams) -> Prepared:
        """Return the same with other sampling parameters."""
        given = msgspec.structs.replace(self.input, sampling=sampling)
        return msgspec.structs.replace(self, input=given)


async def prepare(service: GenerationService, conversation: Conversation) -> Prepared:
    """Render the prompt, and plan how the answer is constrained and parsed.

    Raises:
        RequestError: The messages cannot be rendered, or the tool choice names no tool.
    """
    messages, media = split_media(conversation.messages)
    if media:
        conversation = msgspec.structs.replace(conversation, messages=messages)
    prompt = await render(service, conversation)
    plan = plan_answer(
        service.parsers,
        AnswerRequest(
            sampling=conversation.sampling,
            tool_use=conversation.tool_use,
            variables=service.variables(conversation.variables),
            continued=_last_text(conversation) if conversation.continue_final else None,
            separate_reasoning=conversation.separate_reasoning,
            stream_reasoning=conversation.stream_reasoning,
            thinking_budget=conversation.thinking_budget,
        ),
        prompt.text or ending(service.manager.tokenizer, prompt.input_ids),
    )
    facts = conversation.request
    return Prepared(
        input=GenerateInput(
            input_ids=prompt.input_ids,
            sampling=plan.sampling,
            rid=facts.rid,
            stream=facts.stream,
            logprobs=facts.logprobs,
            lora=facts.lora,
            tenant=facts.tenant,
            cache_salt=facts.cache_salt,
            options=facts.options,
            thinking=plan.thinking,
            media=tuple(media),
            origin=service.origin,
        ),
        rules=plan.rules,
        prompt=prompt,
    )


def _last_text(conversation: Conversation) -> str:
    """Return the text of the message that the model continues."""
    content = conversation.messages[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)


async def render(service: GenerationService, conversation: Conversation) -> RenderedPrompt:
    """Return the prompt of a conversation."""
    if conversation.input_ids is not None:
        if not conversation.input_ids:
            raise RequestError("input_ids must not be empty.", param="input_ids")
        return RenderedPrompt("", list(conversation.input_ids))
    use = conversation.tool_use
    shown = use.tools if use.tools and use.choice != "none" else None
    messages, _ = split_media(conversation.messages)
    request = ChatRequest(
        messages=messages,
        tools=shown,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final,
        template=conversation.template,
        kwargs=service.variables(conversation.variables),
        allow_control_tokens=service.text.allow_control_text,
    )
    return await render_chat(service, request)


async def render_chat(service: GenerationService, request: ChatRequest) -> RenderedPrompt:
    """Render and tokenise a conversation.

    Raises:
        RequestError: The template rejects the messages, there is no template, or the text exceeds
            any context.
    """
    length = service.manager.facts.context_len
    size = _size(chain(_texts(request.messages), request.tools or ()), INLINE_CHARS)
    if size <= min(INLINE_CHARS, MAX_CHARS_PER_TOKEN * length):
        return service.template.render(request)
    return await call_in_thread(_render, service, request, length)


def _render(service: GenerationService, request: ChatRequest, length: int) -> RenderedPrompt:
    limit = MAX_CHARS_PER_TOKEN * length
    for name, items in (("messages", _texts(request.messages)), ("tools", request.tools or ())):
        size = _size(items, limit)
        if size > limit:
            raise ContextLengthError.of_text(size, length, name)
    return service.template.render(request)


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Return the texts that a template renders; images and the like are only markers."""
    for message in messages:
        for name, value in message.items():
            if name == "content" and isinstance(value, list):
                yield from (part for part in cast(list[Any], value) if not _is_media(part))
            else:
                yield value


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and cast(dict[str, Any], part).get("type") in _MEDIA


def _size(items: Iterable[Any], limit: int) -> int:
    """Estimate the size of values as JSON characters; stops counting above `limit`."""
    total = 0
    left = [iter(items)]
    while left and total <= limit:
        value = next(left[-1], left)
        total += _PUNCTUATION
        if value is left:
            left.pop()
        elif isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):  # abstract types take longer to recognise
            left.append(chain.from_iterable(cast("dict[str, Any]", value).items()))
        elif isinstance(value, list | tuple):
            left.append(iter(cast("Sequence[Any]", value)))
        elif value is not None and isinstance(value, Mapping):
            left.append(chain.from_iterable(cast("Mapping[str, Any]", value).items()))
    return total
