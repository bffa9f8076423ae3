"""Marks of calls that begin or end none."""

from __future__ import annotations

import pytest

from sylvan.text.tools import ParsedTools, ToolParser, ToolSpec, family, parse


def test_a_thousand_broken_calls_cost_a_bounded_number_of_looks_at_the_text() -> None:
    found = family("qwen3_coder")
    assert found is not None
    good = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    specs = ToolSpec.from_openai([{"type": "function", "function": {"name": "f"}}])
    broken = "<tool_call>x "

    few = parse(broken * 200 + good, found.grammar, specs)
    assert few.text == (broken * 200).rstrip()
    assert [call.arguments for call in few.calls] == ['{"a": 1}']
    many = broken * 300 + good + " end "
    assert parse(many, found.grammar, specs) == ParsedTools(many, [])
    parser, streamed = ToolParser(found.grammar, specs), ParsedTools()
    for place in range(0, len(many), 7):
        streamed.add(parser.feed(many[place : place + 7]))
    streamed.add(parser.finish())
    assert streamed == ParsedTools(many, [])


# the marks are special tokens of Kimi K2's own template (tokenizer_config.json, chat_template)
@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        ("Hi<|tool_calls_section_end|> there", "Hi there", []),
        ("a<|tool_call_end|>b", "ab", []),
        ("<|tool_calls_section_begin|><|tool_calls_section_end|>x", "x", []),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"a": "b"<|tool_call_end|><|tool_calls_section_end|>',
            "",
            [("f", '{"a": "b"')],
        ),
        (
            "Well.<|tool_call_end|><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "Well.",
            [("f", '{"a": 1}')],
        ),
    ],
)
def test_stray_marks_of_kimi_k2_leave_no_trace(text: str, left: str, calls: list) -> None:
    found = family("kimi_k2")
    assert found is not None
    specs = ToolSpec.from_openai([{"type": "function", "function": {"name": "f"}}])
    whole = parse(text, found.grammar, specs)
    parser, streamed = ToolParser(found.grammar, specs), ParsedTools()
    for char in text:
        streamed.add(parser.feed(char))
    streamed.add(parser.finish())

    assert (whole.text, [(c.name, c.arguments) for c in whole.calls]) == (left, calls)
    assert streamed == whole
