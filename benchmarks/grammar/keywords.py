"""Measures which JSON Schema keywords each installed grammar library supports; writes the table.

    python benchmarks/grammar/keywords.py [--check]

A keyword counts as supported if a schema that uses it compiles, valid texts are accepted, and
invalid texts are not.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from page import put

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import GrammarBackend
from sylvan.runtime.features.grammar.libraries import (
    installed_backends,
    library_version,
    make_backend,
)
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.vocabulary import GreedyEncoder, Vocabulary

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
CLOSED = {"type": "object", "additionalProperties": False}
PAIR = {"a": INTEGER, "b": INTEGER}

# keyword: schema, valid values, invalid values
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": (INTEGER, [1, -3], ["x", None, 1.5]),
    "type (several)": ({"type": ["integer", "null"]}, [1, None], ["x"]),
    "enum": ({"enum": ["a", 1, None]}, ["a", 1, None], ["b"]),
    "const": ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    "properties": ({**CLOSED, "properties": PAIR}, [{"a": 1, "b": 2}], [{"a": "x"}]),
    "required": ({**CLOSED, "properties": PAIR, "required": ["b"]}, [{"b": 1}], [{}, {"a": 1}]),
    "additionalProperties": (
        {"type": "object", "additionalProperties": INTEGER}, [{"z": 1}], [{"z": "x"}],
    ),
    "patternProperties": (
        {**CLOSED, "patternProperties": {"^x[0-9]$": INTEGER}}, [{"x1": 2}], [{"x1": "a"}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{"ab": 1}], [{"z": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "dependentRequired": (
        {**CLOSED, "properties": PAIR, "dependentRequired": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}],
    ),
    "dependentSchemas": (
        {**CLOSED, "properties": PAIR, "dependentSchemas": {"a": {"required": ["b"]}}},
        [{"b": 1}], [{"a": 1}],
    ),
    "items": ({"type": "array", "items": INTEGER}, [[], [1, 2]], [["x"]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [[1, "x"]], [["x", 1]],
    ),
    "minItems": ({"type": "array", "items": INTEGER, "minItems": 2}, [[1, 2]], [[1]]),
    "maxItems": ({"type": "array", "items": INTEGER, "maxItems": 1}, [[1]], [[1, 2]]),
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [[1]], [[2]]),
    "minContains": (
        {"type": "array", "contains": {"const": 1}, "minContains": 2}, [[1, 1]], [[1, 2]],
    ),
    "maxContains": (
        {"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1, 2]], [[1, 1], [2]],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1]], [[1, 2]],
    ),
    "minLength": ({**STRING, "minLength": 2}, ["ab"], ["a"]),
    "maxLength": ({**STRING, "maxLength": 2}, ["ab", ""], ["abc"]),
    "pattern": ({**STRING, "pattern": "^[a-c]{2}$"}, ["ab"], ["a", "zz"]),
    "format: date": ({**STRING, "format": "date"}, ["2024-02-28"], ["today", "2024-13-01"]),
    "format: date-time": ({**STRING, "format": "date-time"}, ["2024-02-28T10:00:00Z"], ["today"]),
    "format: email": ({**STRING, "format": "email"}, ["a@example.org"], ["nobody"]),
    "format: uuid": (
        {**STRING, "format": "uuid"}, ["2d2f7a8c-1f4e-4c5c-8e1c-0a5f4d1e2b3c"], ["1234"],
    ),
    "format: ipv4": ({**STRING, "format": "ipv4"}, ["127.0.0.1"], ["1.2"]),
    **{
        f"format: {name}": ({**STRING, "format": name}, [good], [bad])
        for name, good, bad in (
            ("ipv6", "2001:db8::1", "1.2.3.4"),
            ("time", "10:00:00Z", "25:00:00Z"),
            ("duration", "P1DT2H", "1 day"),
            ("hostname", "a.example.org", "-a_"),
            ("uri", "https://example.org/a?b=c", "a b"),
            ("uri-reference", "../a?b=c", "a b"),
            ("uri-template", "https://example.org/{a}", "{a"),
            ("iri", "https://example.org/\u00e9", "a b"),
            ("iri-reference", "../\u00e9", "a b"),
            ("idn-email", "\u00e9@example.org", "nobody"),
            ("idn-hostname", "b\u00fccher.example", "-a_"),
            ("json-pointer", "/a/0", "a"),
            ("relative-json-pointer", "1/a", "/a"),
            ("regex", "^a+$", "(a"),
        )
    },
    "minimum": ({**INTEGER, "minimum": 5}, [5, 12], [4, -7]),
    "maximum": ({**INTEGER, "maximum": 5}, [5, -9], [6, 12]),
    "exclusiveMinimum": ({**INTEGER, "exclusiveMinimum": 5}, [6], [5]),
    "exclusiveMaximum": ({**INTEGER, "exclusiveMaximum": 5}, [4, -7], [5, 6]),
    "multipleOf": ({**INTEGER, "multipleOf": 3}, [3, 9], [4]),
    "minimum (number)": ({**NUMBER, "minimum": 0.5}, [0.5, 0.75, 12], [0.25, 0, -1.5]),
    "maximum (number)": ({**NUMBER, "maximum": 2.5}, [2.5, 2, -7.25], [2.75, 3]),
    "exclusiveMinimum (number)": ({**NUMBER, "exclusiveMinimum": 0.5}, [0.75, 1], [0.5, 0.25]),
    "exclusiveMaximum (number)": ({**NUMBER, "exclusiveMaximum": 2.5}, [2.25, -1], [2.5, 3]),
    "multipleOf (number)": ({**NUMBER, "multipleOf": 0.5}, [1.5, 2], [0.25]),
    "anyOf": ({"anyOf": [INTEGER, {"type": "null"}]}, [1, None], ["x"]),
    "oneOf": ({"oneOf": [INTEGER, {"type": "null"}]}, [1, None], ["x"]),
    "allOf": ({"allOf": [INTEGER, {"minimum": 5}]}, [6], [4]),
    "not": ({"type": "integer", "not": {"const": 3}}, [4], [3]),
    "if/then/else": (
        {"if": {"type": "integer"}, "then": {"minimum": 5}, "else": STRING}, [6, "x"], [4, None],
    ),
    "$ref, $defs": (
        {"$defs": {"n": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/n"}}, [[1]], [["x"]],
    ),
    "$ref (recursive)": (
        {**CLOSED, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        [{"next": {"next": None}}], [{"next": 1}],
    ),
    "$anchor": (
        {"$defs": {"n": {**INTEGER, "$anchor": "n"}}, "type": "array", "items": {"$ref": "#n"}},
        [[1]], [["x"]],
    ),
    "$id": (
        {
            "$id": "https://example.org/a", "type": "array", "items": {"$ref": "b"},
            "$defs": {"n": {"$id": "b", **INTEGER}},
        },
        [[1]], [["x"]],
    ),
    "$dynamicRef": (
        {
            "$dynamicAnchor": "node", **CLOSED,
            "properties": {"next": {"anyOf": [{"$dynamicRef": "#node"}, {"type": "null"}]}},
        },
        [{"next": {"next": None}}], [{"next": 1}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": PAIR, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"z": 1}],
    ),
}  # fmt: skip


def byte_vocabulary() -> Vocabulary:
    tokens = [*(bytes([i]) for i in range(256)), b"<|end|>"]
    return Vocabulary(tokens, {"<|end|>": 256}, (256,), GreedyEncoder(tokens, frozenset({256})))


def verdict(backend: GrammarBackend, case: tuple[Any, list[Any], list[Any]]) -> str:
    schema, good, bad = case
    try:
        grammar = backend.compile(GrammarSpec("json_schema", json.dumps(schema)))
    except RequestError:
        return "refused"

    def accepts(value: Any) -> bool:
        separated = (None, (",", ":"))
        texts = {json.dumps(value, separators=s, ensure_ascii=False) for s in separated}
        return any(_accepts(grammar.matcher(), text.encode()) for text in texts)

    if any(accepts(value) for value in bad):
        return "not enforced"
    return "yes" if all(accepts(value) for value in good) else "too strict"


def _accepts(matcher: Any, text: bytes) -> bool:
    return all(matcher.accept(byte) for byte in text) and matcher.is_accepting()


def table() -> str:
    names = [name for name in installed_backends() if name != "combined"]
    made = {n: make_backend(n, byte_vocabulary()) for n in names}
    rows = [
        f"| keyword | {' | '.join(map(library_version, names))} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for keyword, case in CASES.items():
        found = [verdict(made[name], case) for name in names]
        rows.append(f"| `{keyword}` | {' | '.join(found)} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only report whether the page is out of date"
    )
    options = parser.parse_args()
    return put("keywords", table(), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
