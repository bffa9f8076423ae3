"""Calls of one of the offered tools, two calls at once, and answers from their results."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tools.train.data.arithmetic import arithmetic
from tools.train.data.base import Example, Message, assistant, casual, key_of, maybe_system, user
from tools.train.data.facts import facts
from tools.train.data.smalltalk import smalltalk
from tools.train.data.tools_table import CONDITIONS, TOOLS, Param, Tool
from tools.train.data.words import ADJECTIVES, COLOURS, NAMES, NOUNS, split_words

_WORD = Param((), "string", "A word", lambda rng: rng.choice(NOUNS))
_COUNT = Param((), "integer", "A number", lambda rng: rng.randint(0, 999))
_VERBS = split_words("get set find make open close start stop check update delete book order list")
_LABELS = split_words("name count size color id kind key level value item user number n x y text")
_GENERIC = (
    "Call {f} with {args}.", "Use {f} with {args}.", "Run {f} with {args}.",
    "Please call {f} with {args}.", "Use the {f} tool with {args}.",
)  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """A tool as one conversation shows it: its name, its parameters' names, its schema."""

    tool: Tool
    name: str
    names: dict[str, str]
    schema: dict[str, Any]


def _made_up_tool(rng: random.Random) -> Tool:
    name = f"{rng.choice(_VERBS)}_{rng.choice(NOUNS)}"
    labels = rng.sample(_LABELS, rng.choice((1, 2, 2)))
    params: dict[str, Param] = {}
    for label in labels:
        base = rng.choice((_WORD, _COUNT))
        params[label] = Param((label,), base.kind, base.about, base.make)
    about = f"{name.split('_')[0].capitalize()} a {name.split('_')[1]}"
    form = rng.choice(("{l} {{{l}}}", "{l}={{{l}}}", "{l} = {{{l}}}"))
    args = " and ".join(form.format(l=label) for label in labels)
    asks = tuple(ask.format(f=name, args=args) for ask in _GENERIC)
    return Tool((name,), (about,), params, asks, (("{t}", "Result: {t}"),))


def _offer(rng: random.Random, tool: Tool) -> Offer:
    """Return a tool with names drawn from its alternatives, in one of the common schema styles."""
    described, required = rng.random() < 0.45, rng.random() < 0.75
    names = {}
    properties: dict[str, Any] = {}
    for label, param in tool.params.items():
        names[label] = rng.choice(param.names)
        properties[names[label]] = {"type": param.kind}
        if param.options and rng.random() < 0.7:
            properties[names[label]]["enum"] = list(param.options)
        if described:
            properties[names[label]]["description"] = param.about
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = [
            names[label] for label in tool.params if label not in tool.optional
        ]
    if rng.random() < 0.08:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": rng.choice(tool.names)}
    if rng.random() < 0.88:
        function["description"] = rng.choice(tool.about)
    function["parameters"] = parameters
    if rng.random() < 0.06:
        function["strict"] = True
    schema = {"type": "function", "function": function}
    return Offer(tool, function["name"], names, schema)


def _offers(rng: random.Random) -> list[Offer]:
    """Return one to three tools with distinct names; the first is the one to use."""
    chosen: list[Offer] = []
    wanted = rng.choice((1, 1, 1, 2, 2, 3))
    while len(chosen) < wanted:
        made = rng.random() < 0.2
        offer = _offer(rng, _made_up_tool(rng) if made else rng.choice(TOOLS))
        clash = any(
            offer.name == other.name or offer.tool.asks[0][:9] == other.tool.asks[0][:9]
            or {offer.tool.names[0], other.tool.names[0]} == {"calculator", "add"}
            for other in chosen
        )  # fmt: skip
        if not clash:
            chosen.append(offer)
    return chosen


def _arguments(rng: random.Random, offer: Offer) -> dict[str, Any]:
    values = {label: param.make(rng) for label, param in offer.tool.params.items()}
    while "from" in values and values["from"] == values["to"]:
        values["to"] = offer.tool.params["to"].make(rng)
    return values


def _asked(rng: random.Random, offer: Offer) -> tuple[str, dict[str, Any]]:
    """Draw a request for a tool, with the arguments that it states."""
    values = _arguments(rng, offer)
    ask = rng.choice(offer.tool.asks)
    stated = {label: value for label, value in values.items() if f"{{{label}}}" in ask}
    return ask.format(**values), stated


Asked = tuple[str, list[tuple[Offer, dict[str, Any]]]]


def _one(rng: random.Random, offer: Offer) -> Asked:
    """A request for one call."""
    text, values = _asked(rng, offer)
    return casual(rng, text), [(offer, values)]


def _two_tools(rng: random.Random, offers: list[Offer]) -> Asked:
    """One request that needs two different tools."""
    pair = rng.sample(offers, 2)
    asked = [_asked(rng, offer) for offer in pair]
    first, second = (text for text, _ in asked)
    if rng.random() < 0.5:
        text = first + rng.choice((" And ", " Also, ", " Then ")) + second[:1].lower() + second[1:]
    else:
        text = f"{first} {second}"
    return text, [(offer, values) for offer, (_, values) in zip(pair, asked, strict=True)]


def _one_tool_twice(rng: random.Random, offer: Offer) -> Asked:
    """One request that needs the same tool for two values."""
    label = next(iter(offer.tool.params))
    first = second = offer.tool.params[label].make(rng)
    while first == second:
        second = offer.tool.params[label].make(rng)
    text = rng.choice(offer.tool.asks).format(**{label: f"{first} and {second}"})
    return casual(rng, text), [(offer, {label: first}), (offer, {label: second})]


def _double(rng: random.Random, offers: list[Offer]) -> Asked | None:
    """A request for two calls, if these tools allow one."""
    if len(offers) > 1 and rng.random() < 0.6:
        return _two_tools(rng, offers)
    if len(offers[0].tool.params) == 1:
        return _one_tool_twice(rng, offers[0])
    return None


def _calls_turn(asked: Asked) -> Message:
    calls = []
    for number, (offer, values) in enumerate(asked[1], 1):
        arguments = {offer.names[label]: value for label, value in values.items()}
        function = {"name": offer.name, "arguments": arguments}
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _call_key(asked: Asked) -> str:
    parts: list[object] = ["tool"]
    for offer, values in asked[1]:
        parts += [offer.name, *offer.names.values(), *values.values()]
    return key_of(*parts)


def _result(rng: random.Random, offer: Offer, values: dict[str, Any]) -> tuple[str, str]:
    """A tool's result and the sentence that reports it."""
    shape, sentence = rng.choice(offer.tool.results)
    slots = {
        **values,
        "i": rng.randint(-9, 40) if "{w}" in shape else rng.randint(0, 9999),
        "w": rng.choice(CONDITIONS),
        "h": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
        "t": f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} of {rng.choice((*NAMES, *COLOURS))}",
    }
    content = shape.format(**slots)
    if content.startswith("{") and rng.random() < 0.3:
        content = json.dumps(json.loads(content), separators=(",", ":"))
    return content, sentence.format(**slots)


def _answer_turns(rng: random.Random, asked: Asked) -> list[Message]:
    """The results of the calls and the answer that reports them."""
    messages: list[Message] = []
    replies: list[str] = []
    for number, (offer, values) in enumerate(asked[1], 1):
        content, reply = _result(rng, offer, values)
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": content})
        replies.append(reply)
    return [*messages, assistant(" ".join(replies))]


def _plain(rng: random.Random, offers: list[Offer]) -> Example:
    """A question that needs none of the tools."""
    if any(offer.tool.names[0] in ("calculator", "add") for offer in offers):
        return smalltalk(rng)
    return rng.choice((facts, facts, facts, smalltalk, smalltalk, arithmetic))(rng)


def _schemas(rng: random.Random, offers: list[Offer]) -> list[dict[str, Any]]:
    schemas = [offer.schema for offer in offers]
    rng.shuffle(schemas)
    return schemas


def tool_call(rng: random.Random) -> Example:
    """Pick the right tool and fill its arguments, or answer directly where no tool fits."""
    offers = _offers(rng)
    if rng.random() < 0.12:
        other = _plain(rng, offers)
        return Example("tool_call", other.messages, other.keys, tools=_schemas(rng, offers))
    asked = _one(rng, offers[0])
    messages = [*maybe_system(rng), user(asked[0]), _calls_turn(asked)]
    return Example("tool_call", messages, (_call_key(asked),), tools=_schemas(rng, offers))


def tool_parallel(rng: random.Random) -> Example:
    """Two calls in one turn: one tool for two things, or two tools."""
    asked = None
    while asked is None:
        offers = _offers(rng)
        asked = _double(rng, offers)
    messages = [*maybe_system(rng, 0.1), user(asked[0]), _calls_turn(asked)]
    return Example("tool_parallel", messages, (_call_key(asked),), tools=_schemas(rng, offers))


def tool_answer(rng: random.Random) -> Example:
    """A call, its result, and the answer from the result; sometimes two calls."""
    offers = _offers(rng)
    asked = (_double(rng, offers) if rng.random() < 0.2 else None) or _one(rng, offers[0])
    answer = _answer_turns(rng, asked)
    messages = [*maybe_system(rng, 0.1), user(asked[0]), _calls_turn(asked), *answer]
    call_key = _call_key(asked)
    results = [turn["content"] for turn in answer]
    keys = (key_of("answer", call_key, *results), call_key)
    return Example("tool_answer", messages, keys, tools=_schemas(rng, offers))


def tool_session(rng: random.Random) -> Example:
    """Draw several requests with the same tools in one conversation: more per token."""
    offers = _offers(rng)
    messages = maybe_system(rng, 0.15)
    keys: list[str] = []
    rounds = rng.choice((2, 3, 3, 4))
    for number in range(1, rounds + 1):
        if rng.random() < 0.12:
            other = _plain(rng, offers)
            messages += [turn for turn in other.messages if turn["role"] != "system"]
            keys += other.keys
            continue
        rng.shuffle(offers)
        asked = (_double(rng, offers) if rng.random() < 0.25 else None) or _one(rng, offers[0])
        messages += [user(asked[0]), _calls_turn(asked)]
        keys.append(_call_key(asked))
        if number < rounds or rng.random() < 0.5:
            messages += _answer_turns(rng, asked)
    return Example("tool_call", messages, tuple(keys), tools=_schemas(rng, offers))
