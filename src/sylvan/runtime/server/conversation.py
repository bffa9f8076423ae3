"""A conversation on its way to the engine, whatever API it came by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sylvan.api.answering import AnswerRequest, ToolUse, plan_answer
from sylvan.api.media import split_media
from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.chat_prompt import render_chat
from sylvan.runtime.server.context import Context
from sylvan.runtime.tokenizer.types import GenerateInput
from sylvan.text.chat_template import ChatRequest, RenderedPrompt
from sylvan.text.output import OutputRules
from sylvan.text.reasoning.tokens import ending


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFacts:
    """What the engine is told beside prompt and sampling."""

    rid: str
    stream: bool
    tenant: str = ""
    logprobs: LogprobOptions | None = None
    lora: str | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What a client wants answered, in the terms that all APIs share.

    Attributes:
        messages: Messages in the OpenAI shape.
        tool_use: Functions that may or must be called.
        sampling: How to answer.
        variables: For the chat template.
        template: Name of a chat template.
        add_generation_prompt: Begin a new message.
        continue_final: Go on with the last message instead.
        separate_reasoning: Take thinking out of the text.
        stream_reasoning: Pass thinking on as it comes.
        thinking_budget: Tokens of thinking after which it is made to end.
        input_ids: Replaces the rendering of the messages.
        request: Everything else that the engine is told.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: SamplingParams
    tool_use: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    thinking_budget: int | None = None
    input_ids: Sequence[int] | None = None
    request: RequestFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A conversation that can be given to the engine.

    Attributes:
        input: For the engine.
        rules: How its outputs are read.
        prompt: What the messages became.
    """

    input: GenerateInput
    rules: OutputRules
    prompt: RenderedPrompt

    def with_sampling(self, sampling: SamplingParams) -> Prepared:
        """The same with other sampling parameters."""
        return replace(self, input=replace(self.input, sampling=sampling))


async def prepare(context: Context, conversation: Conversation) -> Prepared:
    """Render the prompt, and settle how the answer is constrained and read.

    Raises:
        RequestError: The messages cannot be rendered, or the tool choice is no tool.
    """
    messages, media = split_media(conversation.messages)
    conversation = replace(conversation, messages=messages)
    prompt = await render(context, conversation)
    plan = plan_answer(
        context.parsers,
        AnswerRequest(
            sampling=conversation.sampling,
            tool_use=conversation.tool_use,
            variables={**context.settings.default_chat_template_kwargs, **conversation.variables},
            continued=_last_text(conversation) if conversation.continue_final else None,
            separate_reasoning=conversation.separate_reasoning,
            stream_reasoning=conversation.stream_reasoning,
            thinking_budget=conversation.thinking_budget,
        ),
        prompt.text or ending(context.engine.tokenizer, prompt.input_ids),
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
            priority=facts.priority,
            deadline_s=facts.deadline_s,
            ttft_ms=facts.ttft_ms,
            tpot_ms=facts.tpot_ms,
            thinking=plan.thinking,
            media=tuple(media),
        ),
        rules=plan.rules,
        prompt=prompt,
    )


def _last_text(conversation: Conversation) -> str:
    """Text of the message that the model goes on with."""
    content = conversation.messages[-1].get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)


async def render(context: Context, conversation: Conversation) -> RenderedPrompt:
    """The prompt of a conversation."""
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
        kwargs={**context.settings.default_chat_template_kwargs, **conversation.variables},
        forge_ok=context.settings.allow_control_text,
    )
    return await render_chat(context, request)
