from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.rewrite import SupportedKeywords, arrays, context, rewrite
from sylvan.runtime.features.grammar.rewrite.complement import not_beginning_with, other_than
from sylvan.runtime.features.grammar.rewrite.formats import PATTERNS
from sylvan.runtime.features.grammar.spec import NotSupportedError

SUPPORTED = SupportedKeywords(formats=frozenset({"duration", "email"}))
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def rewritten(schema: Any) -> Any:
    return rewrite(schema, SUPPORTED).schema


def is_valid(schema: Any, value: Any) -> bool:
    library = importlib.import_module("jsonschema_rs")
    return library.Draft202012Validator(schema).is_valid(value)


PAIR = {"type": "object", "properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            {
                **PAIR,
                "anyOf": [
                    {
                        "allOf": [
                            {"required": ["a"]},
                            {"type": "object", "properties": {"b": False}},
                        ]
                    },
                    {
                        "allOf": [
                            {"required": ["b"]},
                            {"type": "object", "properties": {"a": False}},
                        ]
                    },
                ],
            },
        ),
        (
            {"oneOf": [{"type": "string"}, {"type": "null"}]},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        (
            {"type": ["string", "null"], "not": {"type": "null"}},
            {"type": ["string", "null"], "allOf": [{"type": "string"}]},
        ),
        (
            {"type": "integer", "not": {"enum": [1, 2]}},
            {
                "type": "integer",
                "anyOf": [
                    {"type": "integer", "exclusiveMaximum": 1},
                    {"type": "integer", "exclusiveMinimum": 2},
                ],
            },
        ),
        (
            {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "minItems": 1},
            {
                "type": "array",
                "items": {"enum": ["x", "y"]},
                "minItems": 1,
                "enum": [["x"], ["x", "y"], ["y"], ["y", "x"]],
            },
        ),
        (
            {"properties": {"a": {}}, "unevaluatedProperties": False},
            {
                "properties": {"a": {}},
                "allOf": [{"properties": {"a": True}, "additionalProperties": False}],
            },
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
            {
                "type": "object",
                "properties": {"a": True, "b": True},
                "additionalProperties": False,
            },
        ),
        ({"type": "string", "format": "color-hex"}, {"type": "string"}),
        ({"type": "string", "maxLength": 2.0}, {"type": "string", "maxLength": 2}),
    ],
)
def test_keywords_are_written_by_others(schema: Any, expected: Any) -> None:
    assert rewritten(schema) == expected


def test_a_schema_without_such_keywords_is_given_back() -> None:
    schema = {
        "$schema": DRAFT_7,
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/n"}, "b": {"format": "duration"}},
        "definitions": {"n": {"type": "integer"}, "unused": {"not": {}}},
    }

    assert rewritten(schema) is schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "https://example.org/a.json", "$ref": "a.json#/$defs/n"},
        {"$id": "https://example.org/a.json", "$ref": "https://example.org/a.json#/$defs/n"},
        {"$id": "urn:example:a", "$ref": "#/$defs/n"},
        {"$ref": "#name"},
        {"$ref": "https://example.org/n"},
        {"$dynamicRef": "#dynamic"},
        {"$ref": "#/unknown/0"},
    ],
)
def test_references_to_what_is_in_the_schema_are_local(schema: Any) -> None:
    integer = {
        "$id": "https://example.org/n",
        "$anchor": "inner",
        "type": "integer",
    }
    named = {"$anchor": "name", "$dynamicAnchor": "dynamic", "type": "integer"}
    unknown = [{"type": "integer"}]

    found = rewritten({**schema, "$defs": {"n": integer, "m": named}, "unknown": unknown})

    assert is_valid(found, 1)
    assert not is_valid(found, "x")
    assert found["$ref"].startswith("#/$defs/")


def test_a_reference_to_elsewhere_is_refused_and_says_what_to_do() -> None:
    schema = {"properties": {"a": {"$ref": "https://example.org/other.json#/x"}}}

    with pytest.raises(RequestError) as error:
        rewritten(schema)

    assert "#/properties/a/$ref" in str(error.value)
    assert "put what it refers to under $defs" in str(error.value)
    assert error.value.status == 400
    with pytest.raises(RequestError, match=r"#/\$ref: there is nothing at '#/\$defs/x'"):
        rewritten({"$ref": "#/$defs/x"})


def test_references_back_may_have_something_beside_them() -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"$ref": "#", "required": ["a"]}, "a": {"type": "integer"}},
        "additionalProperties": False,
    }

    found = rewritten(schema)

    assert found["properties"]["next"] == {"$ref": "#/$defs/beside1"}
    assert is_valid(found, {"next": {"a": 1, "next": {"a": 2}}})
    assert not is_valid(found, {"next": {"a": 1, "next": {}}})


def test_older_drafts_are_read_as_they_say() -> None:
    found = rewritten(
        {
            "$schema": DRAFT_4,
            "type": "array",
            "items": [{"minimum": 1, "exclusiveMinimum": True}, {"$ref": "#/definitions/s"}],
            "additionalItems": False,
            "definitions": {"s": {"$ref": "#/definitions/n", "type": "integer"}, "n": {}},
        }
    )

    assert is_valid(found, [2, "x"])
    assert not is_valid(found, [1])
    assert not is_valid(found, [2, "x", 3])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "#/properties/a/uniqueItems: uniqueItems of values that are not given",
        ),
        ({"not": {"type": "integer"}}, "#/not: numbers that are not integers"),
        ({"not": {"format": "duration"}}, "#/not: not format"),
        ({"propertyNames": {"oneOf": [{}, {}]}}, "#/propertyNames: propertyNames of this form"),
        (
            {"contains": {"type": "null"}, "minContains": 99},
            f"#/contains: minContains above {arrays.MAX_MARKED}",
        ),
    ],
)
def test_what_has_no_equivalent_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(NotSupportedError) as error:
        rewritten(schema)

    assert str(error.value) == f"json_schema: {message} is not supported by grammars"
    assert error.value.param == "json_schema"


def test_a_schema_that_explodes_is_refused_by_a_limit() -> None:
    optional = {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(12)]}

    with pytest.raises(RequestError, match=r"unevaluated\.\.\. beside more than 256 choices"):
        rewritten({**optional, "unevaluatedProperties": False})

    branches = [{"not": {"required": [f"a{i}", f"b{i}"]}} for i in range(400)]
    with pytest.raises(RequestError, match=f"more than {context.MAX_SCHEMAS} parts"):
        rewritten({"oneOf": branches})


def test_a_schema_that_nothing_satisfies_is_refused() -> None:
    with pytest.raises(RequestError, match="# matches no text at all"):
        rewritten({"not": {}})


def test_an_endless_schema_by_anchors_is_refused() -> None:
    with pytest.raises(RequestError, match="refers back to itself without end"):
        rewritten({"$anchor": "x", "allOf": [{"$ref": "#x"}]})


def test_unknown_formats_are_named() -> None:
    schema = {
        "items": [{"format": "x"}, {"format": "duration"}, {"format": "int64"}, {"format": "iri"}]
    }

    assert rewrite(schema, SUPPORTED).annotations == ("int64", "x")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "1999-12-31"],
            ["2024-02-30", "2024-04-31", "2024-13-01", "24-1-1"],
        ),
        ("time", ["10:00:00Z", "23:59:59.5+01:00"], ["10:00:00", "24:00:00Z", "1:0:0Z"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2024-04-31T10:00:00Z", "2024-02-01T10:00:00"]),
        ("ipv4", ["0.0.0.0", "255.1.20.3"], ["01.1.1.1", "256.1.1.1", "1.1.1"]),
        ("hostname", ["a.b-c", "x" * 63], ["x" * 64, "-a", "a..b"]),
        ("json-pointer", ["", "/a~0b/~1", "/é"], ["a", "/~", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "0#"], ["/a", "01", "-1"]),
        ("uri-reference", ["", "../a?b#c", "//h:1/x", "mailto:a@b", "a:b"], ["a b", "1:b", "\\"]),
        ("uri-template", ["", "http://x/{a,b*}{?q:3}"], ["{a", "a}", "{}"]),
        ("iri", ["https://bücher.example/é?ä#ö", "x:"], ["é", "a b", "//a"]),
        ("iri-reference", ["é", "../é"], ["a b", "\\"]),
        ("idn-email", ["é@bücher.example", "a.b@c"], ["é", "a@", "@b", "a b@c"]),
        ("idn-hostname", ["bücher.example", "hostname", "실례.테스트"], ["-a", "a_b", "", "a..b"]),
        ("regex", ["", "^a+$", "(a|[a-z]{2,})?\\d", "((a)*b)"], ["(a", "[", "a**", ")", "[z-a]"]),
    ],
)
def test_formats_that_libraries_lack_are_patterns(
    name: str, good: list[str], bad: list[str]
) -> None:
    found = rewritten({"type": "string", "format": name})

    assert found == {"type": "string", "pattern": PATTERNS[name]}
    assert [text for text in good if not is_valid(found, text)] == []
    assert [text for text in bad if is_valid(found, text)] == []


@pytest.mark.parametrize("words", [["a"], ["", "ab", "ac"], ["a", "ab", 'q"\\'], ["]", "^", "-"]])
def test_all_strings_but_some(words: list[str]) -> None:
    others = {"b", "aa", "abc", "\n", "a\n", "é", '"', "\\", "[", *"]^-"} - set(words)

    assert all(is_valid({"pattern": other_than(words)}, text) for text in others)
    assert not any(is_valid({"pattern": other_than(words)}, text) for text in words)


def test_all_strings_that_begin_otherwise() -> None:
    pattern = json.loads(json.dumps({"pattern": not_beginning_with(["ab", "x"])}))

    assert all(is_valid(pattern, text) for text in ("", "a", "b", "ac", "bx", "\n"))
    assert not any(is_valid(pattern, text) for text in ("ab", "abc", "x", "xy"))
    assert not is_valid({"pattern": not_beginning_with([""])}, "")
