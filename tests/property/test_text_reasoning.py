"""Laws of the reasoning parsers: any cut of the text gives the same, and nothing is lost."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.text.reasoning import ReasoningFamily, family, make_parser, options, separate

FAMILIES = [
    found for name in options() if (found := family(name, chat_template="<think>")) is not None
]


def fragments(found: ReasoningFamily) -> list[str]:
    markers = [*found.starts, *found.ends, *found.interrupts, *found.drops]
    markers += found.inner_call or ()
    markers += [
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|return|>",
        "<|start|>assistant to=user<|message|>",
    ]
    halves = [part for m in markers for part in (m[: len(m) // 2], m[len(m) // 2 :])]
    return [*markers, *halves, "a", "\u4f60\U0001f600", " ", "\n", "\n\n", "<", "to=functions.f"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ReasoningFamily, bool, str, list[str]]:
    found = draw(st.sampled_from(FAMILIES))
    text = "".join(draw(st.lists(st.sampled_from(fragments(found)), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return found, draw(st.booleans()), text, chunks


def stream(found: ReasoningFamily, forced: bool, chunks: list[str]) -> tuple[str, str]:
    parser = make_parser(found, start_in_reasoning=forced)
    deltas = [parser.feed(chunk) for chunk in chunks] + [parser.finish()]
    return "".join(d[0] for d in deltas), "".join(d[1] for d in deltas)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_any_cut_gives_the_same(case) -> None:
    found, forced, text, chunks = case
    at_once = separate(text, found, start_in_reasoning=forced)

    assert stream(found, forced, chunks) == at_once
    assert stream(found, forced, list(text)) == at_once


@given(cases())
@settings(max_examples=150, deadline=None)
def test_only_markers_and_white_space_are_lost(case) -> None:
    found, forced, text, _ = case
    if found.keeps_tags:
        return
    reasoning, content = separate(text, found, start_in_reasoning=forced)
    # of channels the headers are lost too, of blocks all marks, and some have marks of the answer
    if found.channels is not None or found.inner_call is not None or found.drops:
        remaining = iter(text)
        assert all(char in remaining for char in content)
        assert len(reasoning) + len(content) <= len(text)
        return

    start, end = (
        "(?:" + "|".join(map(re.escape, group)) + ")?" for group in (found.starts, found.ends)
    )
    pattern = rf"\s*{start}\s*{re.escape(reasoning)}\s*{end}\s*{re.escape(content)}"
    assert re.fullmatch(pattern, text)
