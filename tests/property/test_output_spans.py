"""Laws of the reported positions of thinking and text, for all formats and ways to cut them."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.text import tools
from sylvan.text.output import OutputReader, OutputRules, ParsedOutput, read_whole
from sylvan.text.spans import TextSpan
from tests.property import test_text_reasoning as thinking
from tests.property import test_text_tools as calling


@st.composite
def cases(draw: st.DrawFn) -> tuple[OutputRules, list[str]]:
    family = draw(st.sampled_from([None, *thinking.FAMILIES]))
    name = draw(st.sampled_from([None, *calling.NAMES]))
    pieces = st.sampled_from(calling.COMMON)
    if family is not None:
        pieces |= st.sampled_from(thinking.fragments(family))
    if name is not None:
        pieces |= st.sampled_from(calling.MARKS[name])
    rules = OutputRules(
        reasoning=family,
        starts_in_reasoning=draw(st.booleans()),
        tools=name and tools.family(name),
        specs=calling.TOOLS,
    )
    return rules, draw(st.lists(pieces, max_size=16))


def join(text: str, spans: list[TextSpan], *, thinking: bool) -> str:
    return "".join(text[s.start : s.stop] for s in spans if s.thinking is thinking)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_spans_hold_the_text_that_is_passed_on(case) -> None:
    rules, chunks = case
    text = "".join(chunks)
    reader, answer, spans = OutputReader(rules), ParsedOutput(), []
    for chunk in chunks:
        answer.add(reader.feed(chunk))
        spans += reader.spans()
    answer.add(reader.finish())
    spans += reader.spans()

    prefix = "<think>" if rules.reasoning and rules.reasoning.keeps_tags and text else ""
    assert join(text, spans, thinking=True) == answer.reasoning
    assert prefix + join(text, spans, thinking=False) == answer.text
    in_order = sorted(spans)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(in_order))
    whole = read_whole(rules, text)
    for kind in (True, False):
        assert join(text, whole.spans, thinking=kind) == join(text, spans, thinking=kind)
