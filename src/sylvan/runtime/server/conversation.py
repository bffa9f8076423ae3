"""A conversation on its way to the engine, whatever API it came by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.chat_prompt import render_chat
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.thinking import Bound, thinking_of
from sylvan.runtime.tokenizer.types import GenerateInput
from sylvan.text.chat_template import ChatRequest, RenderedPrompt
from sylvan.text.output import OutputRules
from sylvan.text.reasoning import ReasoningFamily
from sylvan.text.reasoning.tokens import ending
from sylvan.text.tools import ToolSpec, calls_schema, strict_tags, structural_tags
from sylvan.text.tools import family as tool_family


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """Functions of a request.

    Attributes:
        tools: Definitions in the OpenAI shape.
        choice: "auto", "none", "required", or the name of the function to call.
        parallel: Several calls at once are allowed.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    parallel: bool = True


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


def thinking_variables(
    *, effort: str | float | None = None, enabled: bool | None = None
) -> dict[str, Any]:
    """Template variables that switch thinking; both names that templates use are set."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = effort
        enabled = effort not in ("none", 0) if enabled is None else enabled
    if enabled is not None:
        variables["enable_thinking"] = variables["thinking"] = enabled
    return variables


async def prepare(context: Context, conversation: Conversation) -> Prepared:
    """Render the prompt, and settle how the answer is constrained and read.

    Raises:
        RequestError: The messages cannot be rendered, or the tool choice is no tool.
    """
    prompt = await render(context, conversation)
    family = context.parsers.reasoning
    text = prompt.text or ending(context.engine.tokenizer, prompt.input_ids)
    variables = {**context.settings.default_chat_template_kwargs, **conversation.variables}
    thinks = family is not None and (
        family.leaves_open(_last_text(conversation))
        if conversation.continue_final
        else family.starts_in_reasoning(text, variables)
    )
    rules = _rules(context, conversation, starts=thinks)
    sampling = _constrained(conversation, rules)
    bound = None
    if sampling.grammar is not None:
        bound = _bound(
            conversation, sampling, opens=_may_open(family, conversation, text, variables)
        )
        if not bound.calls and rules.reasoning is not None:
            rules = replace(rules, reasoning=replace(rules.reasoning, interrupts=()))
    if (rules.reasoning and context.parsers.special_thinking) or (
        rules.tools and context.parsers.special_tools
    ):
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    facts = conversation.request
    return Prepared(
        input=GenerateInput(
            input_ids=prompt.input_ids,
            sampling=sampling,
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
            thinking=thinking_of(
                context.parsers,
                inside=thinks,
                budget=conversation.thinking_budget,
                bound=bound,
                calls=rules.tools is not None,
            ),
        ),
        rules=rules,
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
    request = ChatRequest(
        messages=conversation.messages,
        tools=shown,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final,
        template=conversation.template,
        kwargs={**context.settings.default_chat_template_kwargs, **conversation.variables},
        forge_ok=context.settings.allow_control_text,
    )
    return await render_chat(context, request)


def _rules(context: Context, conversation: Conversation, *, starts: bool) -> OutputRules:
    parsers, use = context.parsers, conversation.tool_use
    calling = None
    if use.tools and use.choice != "none":
        calling = parsers.tools
        if use.choice != "auto" and (calling is None or calling.wrapping is None):
            calling = tool_family("json_array")
    thinking = parsers.reasoning if conversation.separate_reasoning else None
    if thinking is not None:  # only what begins a call of this request ends thinking
        markers = calling.grammar.markers if calling is not None else ()
        ends = tuple(mark for mark in thinking.interrupts if mark in markers)
        thinking = replace(thinking, interrupts=ends)
    return OutputRules(
        reasoning=thinking,
        starts_in_reasoning=starts,
        stream_reasoning=conversation.stream_reasoning,
        tools=calling,
        specs=ToolSpec.from_openai(use.tools),
        parallel=use.parallel and use.choice in ("auto", "required"),
    )


def _constrained(conversation: Conversation, rules: OutputRules) -> SamplingParams:
    """Sampling parameters that force the calls the client asked for."""
    use, sampling = conversation.tool_use, conversation.sampling
    forced = use.choice not in ("auto", "none")
    if forced and sampling.grammar is not None:
        if sampling.json_schema is None:
            message = "tool_choice that forces a call excludes grammars of the whole output."
            raise RequestError(message, param="tool_choice")
        sampling = msgspec.structs.replace(sampling, json_schema=None)  # there is no text to form
    if forced and rules.tools is not None:
        tags = structural_tags(rules.tools.wrapping, rules.specs, use.choice)
        if tags is not None:  # calls as the model writes them
            return msgspec.structs.replace(sampling, structural_tag=json.dumps(tags.to_json()))
        schema = calls_schema(rules.specs, use.choice, parallel=use.parallel)
        return msgspec.structs.replace(sampling, json_schema=json.dumps(schema))
    if use.choice == "auto" and any(tool.strict for tool in rules.specs):
        return _strict(rules, sampling)
    formed = use.choice == "auto" and rules.specs and sampling.json_schema is not None
    wrapping = rules.tools and (rules.tools.wrapping or rules.tools.tagged)
    if formed and wrapping:  # the text has its form, and the model may call all the same
        return _tagged(strict_tags(wrapping, rules.specs, _answer(sampling)), sampling)
    return sampling


def _strict(rules: OutputRules, sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters that hold calls to their schemas, should the model call."""
    at, name = next((i, tool.name) for i, tool in enumerate(rules.specs) if tool.strict)
    wrapping = rules.tools and (rules.tools.wrapping or rules.tools.tagged)
    why = ""
    if rules.tools is None:
        why = "this server reads no calls (--tool-call-parser)"
    elif wrapping is None:
        why = f"the form of calls of {rules.tools.name} cannot be held to a schema"
    elif sampling.structural_tag is not None:
        why = "a structural_tag says what the whole output is"
    if wrapping is None or why:
        message = f"tools[{at}] ({name}): strict cannot be honoured: {why}."
        raise RequestError(message, param=f"tools[{at}]")
    return _tagged(strict_tags(wrapping, rules.specs, _answer(sampling)), sampling)


def _tagged(tags: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters with a structural tag in place of other grammars."""
    return msgspec.structs.replace(
        sampling,
        json_schema=None,
        regex=None,
        ebnf=None,
        choice=(),
        structural_tag=json.dumps(tags),
    )


def _answer(sampling: SamplingParams) -> dict[str, Any] | None:
    """The grammar of a request as a part of a structural tag."""
    if sampling.grammar is None:
        return None
    kind, text = sampling.grammar
    match kind:
        case "regex":
            return {"type": "regex", "pattern": text}
        case "ebnf":
            return {"type": "grammar", "grammar": text}
        case "choice":
            options = [{"type": "const_string", "value": value} for value in json.loads(text)]
            return options[0] if len(options) == 1 else {"type": "or", "elements": options}
        case _:
            return {"type": "json_schema", "json_schema": _schema_of(text)}


def _schema_of(text: str) -> Any:
    if text == "$$ANY$$":
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"json_schema is not valid JSON: {error}"
        raise RequestError(message, param="json_schema") from None


def _bound(conversation: Conversation, sampling: SamplingParams, *, opens: bool) -> Bound:
    """How the grammar in `sampling` goes with thinking."""
    ours = sampling is not conversation.sampling  # it is of calls
    calls = ours and sampling.structural_tag is not None
    forced = conversation.tool_use.choice != "auto"
    return Bound(may_open=opens, calls=calls, text=not (calls and forced))


def _may_open(
    family: ReasoningFamily | None,
    conversation: Conversation,
    prompt: str,
    variables: Mapping[str, Any],
) -> bool:
    """Whether the model may begin its answer with thinking that no prompt opened."""
    if family is None or conversation.continue_final:
        return False
    return family.may_start_reasoning(prompt, variables)
