"""Plans how an answer is constrained and parsed, from tools, thinking and grammars together."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.text.output import OutputRules
from sylvan.text.parsers import Parsers
from sylvan.text.reasoning import ReasoningFamily
from sylvan.text.tools import ToolSpec, calls_schema, strict_tags, structural_tags
from sylvan.text.tools import family as tool_family


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request.

    Attributes:
        tools: Definitions in OpenAI's format.
        choice: "auto", "none", "required", or the name of the function to call.
        parallel: Whether several calls are allowed.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    parallel: bool = True


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an answer.

    Attributes:
        sampling: Sampling parameters.
        tool_use: Tools that may or must be called.
        variables: Variables of the chat template.
        continued: Text of the message that the answer continues; None: it starts a new message.
        separate_reasoning: Return reasoning apart from the text.
        stream_reasoning: Stream reasoning as it arrives.
        thinking_budget: Tokens of reasoning after which it is forced to end.
    """

    sampling: SamplingParams
    tool_use: ToolUse = msgspec.field(default_factory=ToolUse)
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    continued: str | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    thinking_budget: int | None = None


class AnswerPlan(msgspec.Struct, frozen=True):
    """How an answer is generated and parsed.

    Attributes:
        sampling: Parameters including the grammar that forces calls, with special tokens kept in
            the text where the parser needs them.
        rules: How the text is split into reasoning, text and calls.
        thinking: Where the answer contains reasoning; None: nowhere.
    """

    sampling: SamplingParams
    rules: OutputRules
    thinking: ThinkingOptions | None


def thinking_variables(
    *, effort: str | float | None = None, enabled: bool | None = None
) -> dict[str, Any]:
    """Return template variables that switch thinking; sets both names that templates use."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = effort
        enabled = effort not in ("none", 0) if enabled is None else enabled
    if enabled is not None:
        variables["enable_thinking"] = variables["thinking"] = enabled
    return variables


def plan_answer(parsers: Parsers, request: AnswerRequest, prompt: str) -> AnswerPlan:
    """Plan how an answer is constrained and parsed.

    Args:
        parsers: The model's reasoning and tool-call parsers.
        request: Options of the answer.
        prompt: The prompt's text, or its end.

    Raises:
        RequestError: Options conflict, or cannot be enforced.
    """
    family = parsers.reasoning
    thinks = family is not None and (
        family.leaves_open(request.continued)
        if request.continued is not None
        else family.starts_in_reasoning(prompt, request.variables)
    )
    rules = _rules(parsers, request, starts=thinks)
    sampling = _constrained(request, rules)
    grammar = None
    if sampling.grammar is not None:
        grammar = _grammar_with_thinking(
            request, sampling, opens=_may_open(family, request, prompt)
        )
        if not grammar.calls and rules.reasoning is not None:
            family = replace(rules.reasoning, interrupts=())
            rules = msgspec.structs.replace(rules, reasoning=family)
    if (rules.reasoning and parsers.special_thinking) or (rules.tools and parsers.special_tools):
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    thinking = thinking_of(
        parsers,
        inside=thinks,
        budget=request.thinking_budget,
        grammar=grammar,
        calls=rules.tools is not None,
    )
    return AnswerPlan(sampling, rules, thinking)


@dataclass(frozen=True, slots=True)
class GrammarWithThinking:
    """A grammar combined with thinking.

    Attributes:
        may_open: The model may start thinking by itself before the grammar starts; otherwise the
            grammar starts with the output, unless the output continues thinking.
        calls: The grammar constrains tool calls in the model's format.
        text: The grammar allows text besides calls, or has no calls.
    """

    may_open: bool
    calls: bool = False
    text: bool = True


def thinking_of(
    parsers: Parsers,
    *,
    inside: bool,
    budget: int | None,
    grammar: GrammarWithThinking | None = None,
    calls: bool = False,
) -> ThinkingOptions | None:
    """Return the engine's thinking parameters; None for a model without thinking.

    A budget limits the output, so a model that does not think satisfies it.

    Args:
        parsers: The model's markers.
        inside: Whether the output continues thinking.
        budget: Most tokens of thinking.
        grammar: The grammar combined with it.
        calls: Whether the request has tools; a call then ends thinking.
    """
    family, starts = parsers.reasoning, parsers.think_starts
    if family is None or not parsers.think_ends:
        return None
    if grammar is None:
        if budget is None and not inside:
            return None
        ends = parsers.think_ends if calls else parsers.think_ends[: len(family.ends)]
        return ThinkingOptions(ends=ends, starts=starts, inside=inside, budget=budget)
    headers = (
        *(parsers.headers if grammar.text else ()),
        *(parsers.call_headers if grammar.calls else ()),
    )
    starts = starts if grammar.may_open and budget != 0 else ()
    if not (inside or starts or headers):
        return None
    return ThinkingOptions(
        # a call ends thinking if the grammar has calls
        ends=parsers.think_ends if grammar.calls else parsers.think_ends[: len(family.ends)],
        starts=starts,
        headers=headers,
        inside=inside,
        budget=budget,
    )


def _rules(parsers: Parsers, request: AnswerRequest, *, starts: bool) -> OutputRules:
    use = request.tool_use
    calling = None
    if use.tools and use.choice != "none":
        calling = parsers.tools
        if use.choice != "auto" and (calling is None or calling.wrapping is None):
            calling = tool_family("json_array")
    thinking = parsers.reasoning if request.separate_reasoning else None
    if thinking is not None:  # only the start of a call in this request ends thinking
        markers = calling.grammar.markers if calling is not None else ()
        ends = tuple(mark for mark in thinking.interrupts if mark in markers)
        if ends != thinking.interrupts:
            thinking = _interrupted(thinking, ends)
    return OutputRules(
        reasoning=thinking,
        starts_in_reasoning=starts,
        stream_reasoning=request.stream_reasoning,
        tools=calling,
        specs=ToolSpec.from_openai(use.tools),
        parallel=use.parallel and use.choice in ("auto", "required"),
    )


@functools.lru_cache(64)
def _interrupted(family: ReasoningFamily, ends: tuple[str, ...]) -> ReasoningFamily:
    """The format with other marks that interrupt thinking."""
    return replace(family, interrupts=ends)


def _constrained(request: AnswerRequest, rules: OutputRules) -> SamplingParams:
    """Return sampling parameters that force the requested calls."""
    use, sampling = request.tool_use, request.sampling
    forced = use.choice not in ("auto", "none")
    if forced and sampling.grammar is not None:
        if sampling.json_schema is None:
            message = "tool_choice that forces a call excludes grammars of the whole output."
            raise RequestError(message, param="tool_choice")
        sampling = msgspec.structs.replace(sampling, json_schema=None)  # no text to constrain
    if forced and rules.tools is not None:
        tags = structural_tags(rules.tools.wrapping, rules.specs, use.choice)
        if tags is not None:  # calls in the model's format
            return msgspec.structs.replace(sampling, structural_tag=json.dumps(tags.to_json()))
        schema = calls_schema(rules.specs, use.choice, parallel=use.parallel)
        return msgspec.structs.replace(sampling, json_schema=json.dumps(schema))
    if use.choice == "auto" and any(tool.strict for tool in rules.specs):
        return _strict(rules, sampling)
    formed = use.choice == "auto" and rules.specs and sampling.json_schema is not None
    wrapping = rules.tools and (rules.tools.wrapping or rules.tools.tagged)
    if formed and wrapping:  # the text is constrained, and the model may still call
        return _tagged(strict_tags(wrapping, rules.specs, _answer(sampling)), sampling)
    return sampling


def _strict(rules: OutputRules, sampling: SamplingParams) -> SamplingParams:
    """Return sampling parameters that make optional calls follow their schemas."""
    at, name = next((i, tool.name) for i, tool in enumerate(rules.specs) if tool.strict)
    wrapping = rules.tools and (rules.tools.wrapping or rules.tools.tagged)
    why = ""
    if rules.tools is None:
        why = "this server parses no tool calls (set --tool-call-parser)"
    elif wrapping is None:
        why = f"the tool call format of {rules.tools.name} cannot be constrained by a schema"
    elif sampling.structural_tag is not None:
        why = "structural_tag already defines the whole output"
    if wrapping is None or why:
        message = f"tools[{at}] ({name}): strict is not supported: {why}."
        raise RequestError(message, param=f"tools[{at}]")
    return _tagged(strict_tags(wrapping, rules.specs, _answer(sampling)), sampling)


def _tagged(tags: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams:
    """Return sampling parameters with a structural tag instead of other grammars."""
    return msgspec.structs.replace(
        sampling,
        json_schema=None,
        regex=None,
        ebnf=None,
        choice=(),
        structural_tag=json.dumps(tags),
    )


def _answer(sampling: SamplingParams) -> dict[str, Any] | None:
    """Convert a request's grammar into a part of a structural tag."""
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


def _grammar_with_thinking(
    request: AnswerRequest, sampling: SamplingParams, *, opens: bool
) -> GrammarWithThinking:
    """Return how the grammar in `sampling` combines with thinking."""
    ours = sampling is not request.sampling  # the grammar constrains calls
    calls = ours and sampling.structural_tag is not None
    forced = request.tool_use.choice != "auto"
    return GrammarWithThinking(may_open=opens, calls=calls, text=not (calls and forced))


def _may_open(family: ReasoningFamily | None, request: AnswerRequest, prompt: str) -> bool:
    """Whether the model may start with thinking that the prompt did not open."""
    if family is None or request.continued is not None:
        return False
    return family.may_start_reasoning(prompt, request.variables)
