"""Refusals of grammars name the field as the client spelt it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sylvan.api.answering import ToolUse
from sylvan.api.client_fields import TOOL_SCHEMA, of_tools, with_client_field
from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.sampling import SamplingParams
from sylvan.text.tools import ToolSpec, calls_schema, family, structural_tags

NAMES = {"json_schema": "response_format.json_schema.schema", "json_schema: #/items": "tools[0].x"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"title": name}}}
    for name in ("a", "b", "c")
]


@pytest.mark.parametrize(
    ("message", "wanted", "param"),
    [
        ("json_schema: #/a: no", f"{NAMES['json_schema']}: #/a: no", NAMES["json_schema"]),
        ("json_schema must be", f"{NAMES['json_schema']} must be", NAMES["json_schema"]),
        ("json_schema: #/items/a is bad", "tools[0].x: #/a is bad", "tools[0].x"),
        ("json_schema: #/items: bad", "tools[0].x: #: bad", "tools[0].x"),
        ("json_schema: #/itemsX: bad", f"{NAMES['json_schema']}: #/itemsX: bad", None),
    ],
)
def test_the_longest_part_that_is_known_is_named(message, wanted, param) -> None:
    found = with_client_field(RequestError(message, param="json_schema", status=413), NAMES)

    assert isinstance(found, RequestError)
    assert (str(found), found.status) == (wanted, 413)
    assert found.param == (param or NAMES["json_schema"])


def test_other_errors_stay() -> None:
    for error in (CapacityError("full"), RequestError("regex: bad", param="regex")):
        assert with_client_field(error, NAMES) is error


@pytest.mark.parametrize("choice", ["required", "b"])
@pytest.mark.parametrize("form", ["structural_tag", "json_schema"])
def test_schemas_of_tools_are_found_in_what_they_became(choice, form) -> None:
    specs = ToolSpec.from_openai(TOOLS)
    if form == "structural_tag":
        calling = family("hermes")
        assert calling is not None
        tags = structural_tags(calling.wrapping, specs, choice)
        assert tags is not None
        value: Any = tags.to_json()
    else:
        value = calls_schema(specs, choice)
    fields: Any = {form: json.dumps(value)}
    used = SamplingParams(**fields)
    use = ToolUse(tools=TOOLS, choice=choice)

    names = of_tools(use, SamplingParams(), used, {TOOL_SCHEMA: ".input_schema"})

    found = set()
    assert names[form] == "tools"
    for key, name in names.items():
        steps = key.removeprefix(f"{form}: #/").split("/")
        node: Any = value
        try:
            for step in steps:
                node = node[int(step) if isinstance(node, list) else step]
            index = ["a", "b", "c"].index(node["title"])
        except (KeyError, ValueError):
            continue  # of another form
        assert name == f"tools[{index}].input_schema"
        found.add(index)
    assert found == ({0, 1, 2} if choice == "required" else {1})
    assert of_tools(use, used, used, {}) == {}


def test_what_stands_beside_calls_keeps_its_name() -> None:
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": {}}}
    calls = {"type": "triggered_tags", "tags": [tag, tag]}
    answer = {"type": "regex", "pattern": "(a"}
    value = {"format": {"type": "or", "elements": [answer, calls]}}
    used = SamplingParams(structural_tag=json.dumps(value))
    use = ToolUse(tools=TOOLS[:2])

    names = of_tools(use, SamplingParams(regex="(a"), used, {"regex": "my.regex"})

    def said(message: str) -> str:
        return str(
            with_client_field(
                RequestError(f"structural_tag: {message}", param="structural_tag"), names
            )
        )

    assert said("#/format/elements/0/pattern: at position 1: x") == "my.regex: at position 1: x"
    inner = "#/format/elements/1/tags/1/content/json_schema/type: no"
    assert said(inner) == "tools[1].function.parameters: #/type: no"
    assert said("#/format/elements/1/tags/1/begin no") == "tools[1]: #/begin no"
    assert said("not compiled within 10 s") == "tools: not compiled within 10 s"
