"""Faults in bodies are named as the client spelt them."""

from __future__ import annotations

import pytest

from sylvan.api.extras import unknown_fields
from sylvan.api.native import GenerateBody, join_salt
from sylvan.api.openai.chat import ChatBody
from sylvan.api.validation import field_path, parse
from sylvan.protocol.errors import RequestError


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}, 5]}, "messages[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [], "tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"messages": [], "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"messages": [], "stop": ["a", 5]}, "stop[1]"),
        ({"messages": [], "n": True}, "n"),
        ({"messages": [], "n": "3"}, "n"),
    ],
)
def test_the_deepest_fault_is_named(body, param):
    with pytest.raises(RequestError) as caught:
        parse(ChatBody, body)
    assert caught.value.param == param


@pytest.mark.parametrize("value", [None, 5, [], "x", True])
def test_a_body_must_be_an_object(value):
    with pytest.raises(RequestError, match="JSON object"):
        parse(GenerateBody, value)


def test_names_without_an_effect_are_listed_where_they_ask_for_something():
    given = {"text": "x", "foo": 1, "no_logs": True, "user": None, "image_data": []}
    body = parse(GenerateBody, given)
    assert unknown_fields(body) == ["foo", "no_logs"]


def test_known_names_that_cannot_be_honoured_are_refused():
    with pytest.raises(RequestError, match="video_config is not supported"):
        unknown_fields(parse(GenerateBody, {"text": "x", "video_config": {"fps": 2}}))


def test_paths_are_spelt_as_in_javascript():
    assert field_path(("a", 0, "b", 1)) == "a[0].b[1]"


def test_different_salts_stay_different():
    salts = {join_salt(a, b) for a in (None, "a", "ab") for b in (None, "b", "bb")}
    assert len(salts) == 9
