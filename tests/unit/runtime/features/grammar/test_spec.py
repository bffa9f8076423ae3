"""Grammars as clients write them, and structural tags as Lark."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.grammar.spec import (
    MAX_DEPTH,
    GrammarSpec,
    check_limits,
    spec_of,
)
from sylvan.runtime.features.grammar.structural import escape_slashes, literal, tree_of

EMPTY = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"regex": "a"}, GrammarSpec("regex", "a")),
        ({"choice": ("a", "b")}, GrammarSpec("choice", '["a", "b"]')),
        ({"json_schema": "$$ANY$$"}, GrammarSpec("json_schema", "$$ANY$$")),
    ],
)
def test_a_request_names_its_grammar(fields, expected) -> None:
    sampling = SamplingParams(**fields)
    request = GenerateRequest(rid="a", input_ids=EMPTY, output_ids=EMPTY, sampling=sampling)

    assert spec_of(request) == expected


def test_an_embedding_has_no_grammar() -> None:
    assert spec_of(EmbedRequest(rid="a", input_ids=EMPTY)) is None


def test_digests_tell_kinds_and_texts_apart() -> None:
    specs = [GrammarSpec("regex", "a"), GrammarSpec("ebnf", "a"), GrammarSpec("regex", "b")]

    assert len({s.digest for s in specs}) == 3


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", '{"const": "' + "[" * 1000 + '"}'),  # in a string
        GrammarSpec("json_schema", "[" * MAX_DEPTH + "]" * MAX_DEPTH),
        GrammarSpec("regex", "\\(" * 1000),
        GrammarSpec("regex", "(a)" * 1000),
    ],
    ids=lambda s: s.text[:12],
)
def test_only_real_nesting_counts(spec) -> None:
    check_limits(spec)


def test_json_that_is_too_deep_for_the_reader_is_refused() -> None:
    with pytest.raises(RequestError, match="nested"):
        check_limits(GrammarSpec("json_schema", "[" * 300_000))


@pytest.mark.parametrize(
    ("regex", "escaped"),
    [("a/b", "a\\/b"), ("a\\/b", "a\\/b"), ("\\\\/", "\\\\\\/"), ("a\nb", "a\\nb"), ("\\n", "\\n")],
)
def test_slashes_are_escaped_once(regex, escaped) -> None:
    assert escape_slashes(regex) == escaped


def test_control_tokens_are_meant_where_they_are_spelt() -> None:
    special = {"<|a|>": 7, "<|ab|>": 8}

    assert literal("x", special) == '"x"'
    assert literal('<|a|>x"<|ab|>', special) == '<[7]> "x\\"" <[8]>'


def test_both_forms_of_tags_become_one_tree() -> None:
    old = {
        "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
        "triggers": ["<f"],
        "at_least_one": True,
    }
    content = {"type": "json_schema", "json_schema": {"type": "null"}}
    expected = {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": False,
    }

    assert tree_of(GrammarSpec("structural_tag", json.dumps(old))) == expected
    assert tree_of(GrammarSpec("structural_tag", json.dumps({"format": expected}))) == expected


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([], "structural_tag must"),
        ({"structures": [], "triggers": []}, "at least one"),
        (
            {"structures": [{"begin": 1}], "triggers": ["a"]},
            "structural_tag: #/structures/0/begin must",
        ),
    ],
)
def test_wrong_tags_are_refused_by_their_path(value, path) -> None:
    with pytest.raises(RequestError) as caught:
        tree_of(GrammarSpec("structural_tag", json.dumps(value)))

    assert path in str(caught.value)
