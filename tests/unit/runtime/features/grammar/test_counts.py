"""Repetitions that are refused before a library sees them, and those that only look like it."""

from __future__ import annotations

import json

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.counts import MAX_COUNT, check_counts
from sylvan.runtime.features.grammar.spec import GrammarSpec

MANY = MAX_COUNT + 1
TAG = {"begin": "<a>", "schema": {"items": {"minItems": MANY}}, "end": "</a>"}
TAGS = {"structures": [TAG], "triggers": ["<a>"]}
REPEAT = {"format": {"type": "repeat", "min": 1, "max": MANY, "content": {"type": "any_text"}}}


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        ("regex", f"ba{{{MANY}}}", "regex: at position 3"),
        ("regex", "a{4294967297}", "position 2"),
        ("regex", "(a|[{]){2,99999999999}", "position 8"),
        ("regex", "a{,99999999999}", "position 2"),
        ("regex", "a{" + "9" * 500_000 + "}", "position 2"),
        ("ebnf", 'root ::= "a"{2000000000}', "ebnf: at position 13"),
        ("ebnf", 'root ::= "a" { 2 , 2000000000 }', "position 14"),
        ("ebnf", f'start: "a" ~ 1..{MANY}', "position 12"),
        (
            "json_schema",
            {"type": "string", "pattern": "^a{99999999999}$"},
            "#/pattern: at position 3",
        ),
        (
            "json_schema",
            {"properties": {"a": {"patternProperties": {"x{999999}": {}}}}},
            "#/properties/a/patternProperties/x{999999}",
        ),
        ("json_schema", {"items": {"minItems": MANY}}, "#/items/minItems"),
        ("json_schema", {"minLength": 1e300}, "#/minLength"),
        ("structural_tag", TAGS, "#/structures/0/schema/items/minItems"),
        ("structural_tag", REPEAT, "#/format/max"),
    ],
)
def test_more_repetitions_than_allowed_are_refused_with_their_place(kind, text, place) -> None:
    spec = GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))

    with pytest.raises(RequestError) as caught:
        check_counts(spec)

    assert caught.value.param == kind
    assert caught.value.status == 400
    assert str(caught.value).startswith(f"{kind}: ")
    assert place in str(caught.value)
    assert f"more than {MAX_COUNT} repetitions" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", f"[a-z]{{1,{MAX_COUNT}}}"),
        ("regex", r"a\{99999999999}"),
        ("regex", "[{99999999999}]"),
        ("regex", "[]{99999999999}]"),
        ("ebnf", 'root ::= "{99999999999}"'),
        ("ebnf", 'root ::= "\\"{99999999999}" [{99999999999}]{3}'),
        ("json_schema", {"maxLength": 99999999999, "maximum": 99999999999, "const": MANY}),
        ("json_schema", {"const": {"pattern": "a{99999999999}", "minLength": MANY}}),
        ("json_schema", "true"),
        ("choice", '["a{99999999999}"]'),
    ],
)
def test_other_numbers_are_no_counts(kind, text) -> None:
    check_counts(GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text)))
