"""Positions of JSON in structural tags, and the watched parts of such an output."""

from __future__ import annotations

import json

import pytest

from sylvan.runtime.features.grammar.guard.regions import (
    MAX_BEGIN_BYTES,
    MAX_REGIONS,
    regions,
)
from sylvan.runtime.features.grammar.guard.watch_factory import watch_factory
from sylvan.runtime.features.grammar.spec import GrammarSpec

DIFFERENT = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
ANY = {"type": "object"}


def tags(tree):
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": tree}))


def schema(value=DIFFERENT):
    return {"type": "json_schema", "json_schema": value}


def tag(begin, value=DIFFERENT, end="</x>"):
    return {"type": "tag", "begin": begin, "content": schema(value), "end": end}


def triggered(*tags, needed=False):
    kind = {"type": "triggered_tags", "triggers": ["<"], "at_least_one": needed}
    return {**kind, "tags": list(tags)}


def text(value):
    return {"type": "const_string", "value": value}


TREES = {
    "tag": (tag("<x>"), {"<x>": "#/format/content/json_schema"}),
    "triggered": (
        triggered(tag("<a>"), tag("<b>")),
        {
            "<a>": "#/format/tags/0/content/json_schema",
            "<b>": "#/format/tags/1/content/json_schema",
        },
    ),
    "whole": (schema(), {"": "#/format/json_schema"}),
    "sequence": (
        {"type": "sequence", "elements": [text("n="), schema(), text(";")]},
        {"n=": "#/format/elements/1/json_schema"},
    ),
    "after free text": (
        {"type": "sequence", "elements": [{"type": "any_text"}, schema()]},
        {},
    ),
    "or": (
        {"type": "or", "elements": [schema(), triggered(tag("<a>"), needed=True)]},
        {
            "": "#/format/elements/0/json_schema",
            "<a>": "#/format/elements/1/tags/0/content/json_schema",
        },
    ),
    "or text": (
        {"type": "or", "elements": [schema(), triggered(tag("<a>"))]},
        {"<a>": "#/format/elements/1/tags/0/content/json_schema"},
    ),
    "or a word": (
        {"type": "or", "elements": [schema(), text("none")]},
        {},
    ),
    "calls that look like JSON": (
        {
            "type": "or",
            "elements": [schema(), triggered(tag('{"name": "a", "arguments": '), needed=True)],
        },
        {'{"name": "a", "arguments": ': "#/format/elements/1/tags/0/content/json_schema"},
    ),
    "same begin": (triggered(tag("<a>"), tag("<a>", ANY)), {}),
    "begin of another": (triggered(tag("<a"), tag("<ab>")), {}),
    "repeated": (
        {"type": "plus", "content": schema()},
        {},
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_schemas_with_a_recognisable_start_are_found(name):
    tree, wanted = TREES[name]

    assert {r.begin.decode(): r.place for r in regions(tags(tree))} == wanted


def test_what_is_looked_for_is_bounded():
    assert len(regions(tags(triggered(*(tag(f"<{n}>") for n in range(MAX_REGIONS)))))) == 512
    assert not regions(tags(triggered(*(tag(f"<{n}>") for n in range(MAX_REGIONS + 1)))))
    assert not regions(tags(triggered(tag("<a>"), tag("<" + "b" * MAX_BEGIN_BYTES))))


def watch(tree, *places):
    spec = tags(tree)
    known = [region.place for region in regions(spec)]
    return watch_factory(spec, dict.fromkeys(places or known, ("uniqueItems",)))()


def breach_of(tree, output, *places):
    made = watch(tree, *places)
    for at, byte in enumerate(output):  # one byte after the other
        if (found := made.write(bytes((byte,)))) is not None:
            assert found.at == at
            return found
    return made.end()


OUTPUTS = [
    ("<x>[1, 2, 1]</x>", "1]"),
    ("<a>[3] and <b> [7, 7]", "7]"),
    ("<a>[1] <a>[2] <b>[5,5]</b>", "5]"),
    ("<a>[1, 2]</x> [1, 1]", None),
    ("<a> is no call [1,1]", None),
    ("[4,4]", "4]"),
    (" \n [4,4]", "4]"),
]


@pytest.mark.parametrize(("output", "broken"), OUTPUTS)
def test_breaches_are_where_the_json_is(output, broken):
    tree = {
        "type": "or",
        "elements": [schema(), triggered(tag("<a>"), tag("<b>"), tag("<x>"), needed=True)],
    }

    found = breach_of(tree, output.encode())

    if broken is None:
        assert found is None
        return
    assert found is not None
    place = output.rindex("[")
    assert found.starts[-1] == place
    assert output[: found.at + 1].endswith(broken[0]) or output[found.at] in ",]"
    assert "uniqueItems" in found.reason
    assert found.name.startswith("structural_tag: #/format/elements/")


def test_free_text_is_not_read():
    tree = triggered(tag("<a>"), tag("<b>"))

    assert breach_of(tree, b"free [1,1] text <a>[3] and <b> [7, 8] [2,2]") is None
    assert breach_of(tree, b"free [1,1] text <a>[3] and <b> [7, 7]") is not None


def test_what_stands_in_strings_begins_nothing():
    tree = triggered(tag("<a>", ANY), tag("<b>"))

    assert breach_of(tree, b'<a>{"k": "<b>[1,1]"}</x>') is None
    assert breach_of(tree, b'<a>{"k": "<b>[1,1]"}</x><b>[1,1]') is not None


def test_numbers_end_where_the_tag_ends():
    tree = tag("<x>", {"type": "integer", "not": {"const": 7}})
    place = "#/format/content/json_schema"
    spec = tags(tree)

    for output, good in ((b"<x>71</x>", True), (b"<x>7</x>", False), (b"<x>7", False)):
        made = watch_factory(spec, {place: ("not",)})()
        found = made.write(output) or made.end()
        assert (found is None) == good


def test_text_outside_is_settled_and_cannot_be_written_in_another_way():
    made = watch(triggered(tag("<a>")))
    made.write(b"hello <a>")
    assert made.undecided_from is None
    assert made.in_string
    made.write(b" [1, ")
    assert made.undecided_from == len("hello <a> ")
    assert not made.in_string
    made.write(b"2]</x>")
    assert made.undecided_from is None
    assert made.length == len("hello <a> [1, 2]</x>")
