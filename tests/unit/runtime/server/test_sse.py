"""Events: one line each, whatever the text."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sylvan.runtime.server.sse import PLACEHOLDER, EventTemplate, event, line, named_event

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    "\u0085\u2028\u2029\u200b\xe2\n\r"
)


@given(text=TEXTS)
def test_an_event_is_one_line_by_any_definition_and_holds_the_text(text):
    frame = EventTemplate({"a": 1, "text": PLACEHOLDER, "z": [2]})
    for data in (event({"text": text}), frame.fill(text)):
        shown = data.decode()
        assert shown.endswith("\n\n")
        assert len(shown.splitlines()) == 2
        assert json.loads(shown.removeprefix("data: "))["text"] == text
    assert len(line({"text": text}).decode().splitlines()) == 1
    assert len(named_event("x", {"text": text}).decode().splitlines()) == 3
