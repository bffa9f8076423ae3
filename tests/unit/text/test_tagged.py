"""Strict calls in the form of models that write arguments between tags."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.text.tools import ToolSpec, family, options, parse, strict_tags
from tests.support.grammar import accept, make_backend

TAGGED = [name for name in options() if name not in ("auto", "beam", "response_template")]
TAGGED = [name for name in TAGGED if family(name).tagged is not None]
DATE = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
SCHEMA: dict[str, Any] = {
    "$defs": {"date": DATE | {"additionalProperties": False}},
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "date": {"$ref": "#/$defs/date"},
        "zip": {"type": "string", "pattern": "^[0-9]{2}$"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
STRICT = ToolSpec("get_weather", SCHEMA, strict=True)
LOOSE = ToolSpec("get", {"type": "object", "properties": {"n": {"type": "integer"}}})
ANSWER = {"type": "const_string", "value": "none"}
ARGUMENTS = {
    "city": "New \u4f60 <b>",
    "unit": "F",
    "days": 3,
    "tags": ["a", "b"],
    "date": {"day": 1},
    "zip": "12",
    "note": "x",
}


def call(name: str, function: str, arguments: dict[str, Any]) -> str:
    """A call as the family writes it."""
    form = family(name).tagged
    text = form.begin.replace("NAME", function)
    for key, value in arguments.items():
        head = form.key.replace("KEY", key)
        text += head.replace("TEXT", "true" if isinstance(value, str) else "false")
        text += value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        text += form.close
    return text + form.end


@functools.cache
def compiled(backend: str, name: str) -> Any:
    tags = strict_tags(family(name).tagged, [STRICT, LOOSE], ANSWER)
    try:
        return make_backend(backend).compile(GrammarSpec("structural_tag", json.dumps(tags)))
    except NotSupportedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("backend", installed_backends())
@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "arguments",
    [ARGUMENTS, {"city": "Ulm", "unit": "C"}, {"city": "", "unit": "C", "date": {"day": 2}}],
    ids=["all", "required", "some"],
)
def test_strict_calls_are_allowed_and_read(backend: str, name: str, arguments: Any) -> None:
    matcher = compiled(backend, name).matcher()
    text = call(name, "get_weather", arguments)

    assert accept(matcher, text.encode())
    assert matcher.is_accepting()
    [found] = parse(text, family(name).grammar, [STRICT, LOOSE]).calls
    assert found.name == "get_weather"
    assert json.loads(found.arguments) == arguments


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "missing": ("get_weather", {"unit": "C"}),
    "enum": ("get_weather", {"city": "Ulm", "unit": "K"}),
    "type": ("get_weather", {"city": "Ulm", "unit": "C", "days": [1]}),
    "items": ("get_weather", {"city": "Ulm", "unit": "C", "tags": ["c"]}),
    "definition": ("get_weather", {"city": "Ulm", "unit": "C", "date": {"day": {}}}),
    "pattern": ("get_weather", {"city": "Ulm", "unit": "C", "zip": "1x"}),
    "extra": ("get_weather", {"city": "Ulm", "unit": "C", "more": 1}),
    "unknown": ("other", {}),
}


@pytest.mark.parametrize("backend", installed_backends())
@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("bad", BAD)
def test_calls_that_break_the_schema_are_not(backend: str, name: str, bad: str) -> None:
    matcher = compiled(backend, name).matcher()

    assert not accept(matcher, call(name, *BAD[bad]).encode())


@pytest.mark.parametrize("backend", installed_backends())
@pytest.mark.parametrize("name", TAGGED)
def test_other_functions_and_the_answer_are_free(backend: str, name: str) -> None:
    loose = call(name, "get", {"n": "no number"})

    assert accept(compiled(backend, name).matcher(), loose.encode())
    assert accept(compiled(backend, name).matcher(), b"none")
    assert not accept(compiled(backend, name).matcher(), b"text")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array"}, "#/type"),
        ({"anyOf": [{}]}, "#/anyOf"),
        ({"properties": {"a": {"type": "string", "minLength": 3}}}, "#/properties/a/minLength"),
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, "#/properties/a/pattern"),
        ({"properties": {"a": {"enum": [" x"]}}}, "#/properties/a"),
        ({"properties": {"a": {"type": "string", "enum": [5]}}}, "#/properties/a"),
        ({"properties": {"a b": {}}}, "#/properties/a b"),
        ({"properties": {"a": False}}, "allows no value"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "#/properties/a/$ref"),
        ({"required": ["a"]}, "#/required"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_held_is_refused_by_its_place(schema: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        strict_tags(family("glm").tagged, [LOOSE, ToolSpec("f", schema, strict=True)], None)

    assert caught.value.param == "tools[1]"
    assert says in str(caught.value)
