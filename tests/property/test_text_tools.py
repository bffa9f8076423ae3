"""Laws of the tool-call parsers: any cut of the text gives the same, nothing is lost or raised."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.text.tools import (
    CallStart,
    ParsedTools,
    TextDelta,
    ToolParser,
    ToolSpec,
    family,
    is_complete,
    options,
    parse,
)

NAMES = [name for name in options() if name not in ("auto", "beam", "response_template")]
TOOLS = (
    ToolSpec(
        "f",
        {
            "properties": {
                "s": {"type": "string"},
                "i": {"type": "integer"},
                "o": {"type": "object"},
            }
        },
    ),
    ToolSpec("g"),
)
COMMON = [
    *("f", "g", "h", "s", "i", "o", "=", '"', "'", "\\", "\\n", "{", "}", "[", "]", "(", ")"),
    *(",", ":", ";", "<", ">", "/", " ", "\n", "1", "-2.5", "true", "None", "\u4f60", "\U0001f600"),
    *(
        '{"name": "f", "arguments": {"s": "x',
        '"}}',
        '{"s": "a", "i": [1, {}]}',
        '"f": {}',
        "f(s=1)",
    ),
    *(
        "<parameter=s>",
        "</parameter>",
        ' name="f">',
        ' name="s" string="true">',
        "call:f{",
        "functions.",
    ),
    *("<arg_key>s</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep>", "```json\n", "```"),
    *(
        '<parameter name="i">',
        '<param name="s">',
        "</param>",
        "[ARGS]",
        "<|message|>",
        " to=functions.f",
    ),
    *("<|tool_call_argument_begin|>", '<|"|>', "<|sep|>", "\uff5c", "<think>", "</think>"),
]


def marks(name: str) -> list[str]:
    """The markers of a family, those of its grammar's fields too, and halves of them."""
    grammar = family(name).grammar
    found: list[str] = []
    for slot in grammar.__slots__:
        value = getattr(grammar, slot)
        values = value if isinstance(value, tuple) else (value,)
        found += [text for text in values if isinstance(text, str) and text]
    halves = [part for text in found for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    return [*found * 3, *halves]


MARKS = {name: marks(name) for name in NAMES}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    name = draw(st.sampled_from(NAMES))
    pieces = st.sampled_from(MARKS[name]) | st.sampled_from(COMMON)
    text = "".join(draw(st.lists(pieces, max_size=16)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return name, text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def stream(name: str, chunks: list[str], tools=TOOLS) -> ParsedTools:
    parser, result = ToolParser(family(name).grammar, tools), ParsedTools()
    for chunk in chunks:
        result.add(parser.feed(chunk))
    result.add(parser.finish())
    return result


@given(cases(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_cut_gives_the_same(case, known: bool) -> None:
    name, text, chunks = case
    tools = TOOLS if known else None
    at_once = parse(text, family(name).grammar, tools)

    assert stream(name, chunks, tools) == at_once
    assert stream(name, list(text), tools) == at_once


@given(cases())
@settings(max_examples=150, deadline=None)
def test_text_without_calls_is_given_back_unchanged(case) -> None:
    name, text, _ = case

    result = parse(text, family(name).grammar, TOOLS)

    grammar = family(name).grammar
    silent = getattr(grammar, "silent", ())
    if getattr(grammar, "drops_strays", False):
        silent = (*silent, *grammar.wrappers, *grammar.closers)
    if not result.calls and not any(mark in text for mark in silent):
        assert result.text == text
    remaining = iter(text)
    assert all(char in remaining for char in result.text)
    assert all(call.name in ("f", "g") for call in result.calls)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_arguments_are_the_beginning_of_json(case) -> None:
    name, text, _ = case

    for call in parse(text, family(name).grammar, TOOLS).calls:
        if not is_complete(call):
            assert _can_be_closed(call.arguments)


def _can_be_closed(text: str) -> bool:
    """Whether some ending makes it JSON: try a few at each depth."""
    endings = ["", '"', "null", ": null", '": null', ' "": null', "1"]
    stack, in_string, escaped = [], False, False
    for char in text:
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
        elif char in "}]":
            stack.pop()
    close = "".join(reversed(stack))
    return any(_is_json(text + ending + close) for ending in endings) or not text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
WRAPPED = [name for name in NAMES if family(name).wrapping]


@given(
    st.sampled_from(WRAPPED),
    st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=3),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_any_arguments_come_back(name: str, arguments: list, data) -> None:
    wrapping = family(name).wrapping
    begin = wrapping.begin.replace("NAME", "f")
    # what a model's output cannot hold, and what its text form would end
    texts = [json.dumps(a, ensure_ascii=data.draw(st.booleans())) for a in arguments]
    text = "".join(f"{begin}{a}{wrapping.end}" for a in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))

    result = stream(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])

    assert [json.loads(call.arguments) for call in result.calls] == arguments
    assert result.text == ""


@given(cases())
@settings(max_examples=200, deadline=None)
def test_events_are_in_order(case) -> None:
    name, _, chunks = case
    parser, index = ToolParser(family(name).grammar, TOOLS), -1

    for event in [e for chunk in [*chunks] for e in parser.feed(chunk)] + parser.finish():
        if isinstance(event, CallStart):
            assert event.index == index + 1
            index += 1
        elif isinstance(event, TextDelta):
            assert event.text
        else:
            assert event.index == index
            assert event.fragment
