"""The contract of grammar backends."""

from __future__ import annotations

import functools
import importlib
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.libraries import installed_backends, make_library
from sylvan.runtime.features.grammar.matchers import Matchers
from sylvan.runtime.features.grammar.overlap import Overlap
from sylvan.runtime.features.grammar.spec import ANY_JSON, GrammarSpec
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots
from tests.support.grammar import (
    CALL,
    END,
    TOKENS,
    accept,
    allowed,
    make_backend,
    vocabulary,
    write,
)

NAMES = installed_backends()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = GrammarSpec("json_schema", json.dumps(PERSON))
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"enum": [1, 23]}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
SEQUENCE = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "A"},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]{2}"},
                    {"type": "const_string", "value": "z"},
                ],
            },
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        ],
    },
}


@functools.cache
def backend(name: str):
    return make_backend(name)


def compiled(name: str, spec: GrammarSpec) -> CompiledGrammar:
    try:
        return backend(name).compile(spec)
    except RequestError as error:
        if f"is not supported by grammar.backend {name}" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_there_is_a_backend() -> None:
    assert "llguidance" in NAMES


CASES = [
    (SCHEMA, ['{"name":"x","age":12}', '{"name": "", "age": -1}'], ['{"age":1,"name":"x"}', "[]"]),
    (GrammarSpec("json_schema", '{"type": "object"}'), ["{}", '{"a": [1, {"b": null}]}'], ["[1]"]),
    (GrammarSpec("json_schema", ANY_JSON), ["[1, 2]", '"x"', "null", '{"a": 1}'], ["nul", "{a"]),
    (GrammarSpec("json_schema", '{"enum": ["a", 1, null]}'), ['"a"', "1", "null"], ['"b"', "2"]),
    (GrammarSpec("regex", "ab+(c|d)"), ["abc", "abbbd"], ["ac", "abcd", ""]),
    (GrammarSpec("regex", "a/b\\n?"), ["a/b", "a/b\n"], ["ab"]),
    (GrammarSpec("regex", "(x|y)*"), ["", "xyx"], ["z"]),
    (GrammarSpec("regex", ".{3}"), ["abc", "1.東"], ["1\n1", "ab"]),
    (
        GrammarSpec("choice", '["yes", "no", "ye\\"s\\u00e9"]'),
        ["yes", "no", 'ye"s\u00e9'],
        ["y", "yesno"],
    ),
    (GrammarSpec("ebnf", 'root ::= "a" b\nb ::= [0-9] | "x" root'), ["a1", "axa2"], ["a", "ax"]),
    (
        GrammarSpec("ebnf", r'root ::= "\u00e9\x41" [\u4e00-\u9fff\U0001F600] # "\ud800"'),
        ["éA東", "éA😀"],
        ["éA", "éAa"],
    ),
    (
        GrammarSpec("structural_tag", json.dumps(TAGS)),
        ["", "plain", "see <f=a>23</f> and <f=b>true</f>."],
        ["<f=", "<f=c>1</f>", "<f=a>2</f>"],
    ),
    (
        GrammarSpec("structural_tag", json.dumps(TAGS | {"at_least_one": True})),
        ["<f=a>1</f>", "<f=a>1</f> so <f=b>false</f>"],
        ["", "plain"],
    ),
    (
        GrammarSpec("structural_tag", json.dumps(SEQUENCE)),
        ["A12<t>so</t>", "Az<t></t>"],
        ["Az", "A1<t></t>"],
    ),
]


@pytest.mark.parametrize(("spec", "good", "bad"), CASES, ids=lambda x: getattr(x, "kind", ""))
def test_exactly_the_texts_of_a_grammar_are_accepted(name, spec, good, bad) -> None:
    grammar = compiled(name, spec)

    for text in good:
        matcher = grammar.matcher()
        assert accept(matcher, text.encode()), text
        assert matcher.is_accepting(), text
    for text in bad:
        matcher = grammar.matcher()
        assert not (accept(matcher, text.encode()) and matcher.is_accepting()), text


@pytest.mark.parametrize(("spec", "good", "bad"), CASES, ids=lambda x: getattr(x, "kind", ""))
def test_a_dumped_grammar_is_loaded_as_the_same(name, spec, good, bad) -> None:
    grammar = compiled(name, spec)

    again = make_library(grammar.library, vocabulary()).load(grammar.dump())

    assert all(accept(again.matcher(), text.encode()) for text in good)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]$', ["a", "\\", "\n", "é"], ['"']),
        (r"^[^\\]$", ["a", '"', "\t"], ["\\"]),
        ('^[^"\\\\\\]]*$', ["", "a\n"], ['a"', "\\", "]"]),
        (r"^[\x00-!#-~]+$", ["a\\ "], ['a"', "é"]),
    ],
)
def test_characters_that_json_escapes_stay_excluded(name, pattern, good, bad) -> None:
    schema = {"type": "string", "pattern": pattern}
    grammar = compiled(name, GrammarSpec("json_schema", json.dumps(schema)))

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        written = json.dumps(text, ensure_ascii=False).encode()
        return accept(matcher, written) and matcher.is_accepting()

    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []


REWRITTEN = {
    "type": "object",
    "properties": {"kind": {"enum": ["card", "cash"]}, "number": {"type": "string"}},
    "required": ["kind"],
    "if": {"properties": {"kind": {"const": "card"}}},
    "then": {"required": ["number"]},
    "unevaluatedProperties": False,
}


def test_a_schema_is_rewritten_in_keywords_that_libraries_hold(name) -> None:
    grammar = compiled(name, GrammarSpec("json_schema", json.dumps(REWRITTEN)))

    def accepts(value: object) -> bool:
        matcher = grammar.matcher()
        return accept(matcher, json.dumps(value).encode()) and matcher.is_accepting()

    assert accepts({"kind": "cash"})
    assert accepts({"kind": "card", "number": "12"})
    assert not accepts({"kind": "card"})
    assert not accepts({"kind": "cash", "other": 1})


def test_masks_hold_what_can_be_accepted(name) -> None:
    matcher = compiled(name, GrammarSpec("regex", "(yes|yeah|no) [0-9]")).matcher()

    first = allowed(matcher)
    assert {TOKENS[i] for i in first} <= {b"y", b"n", b"yes", b"ye", b"no"}
    assert {TOKENS.index(b"yes"), TOKENS.index(b"no")} <= first
    assert matcher.accept(TOKENS.index(b"yes"))
    assert allowed(matcher) == {ord(" ")}
    assert not matcher.accept(ord("x"))
    assert not matcher.accept(CALL)
    assert matcher.accept(ord(" "))
    assert allowed(matcher) == {ord(d) for d in "0123456789"}


def test_control_tokens_and_padding_are_no_text(name) -> None:
    matcher = compiled(name, GrammarSpec("regex", "(.|\\n)*")).matcher()

    ids = allowed(matcher)

    assert {ord("a"), ord("<"), TOKENS.index(b" the")} <= ids
    assert CALL not in ids
    assert all(TOKENS[i] for i in ids)


def test_a_control_token_comes_where_a_tag_names_it(name) -> None:
    tags = TAGS["structures"][0] | {"begin": "<|call|>f:"}
    spec = GrammarSpec(
        "structural_tag", json.dumps({"structures": [tags], "triggers": ["<|call|>"]})
    )
    matcher = compiled(name, spec).matcher()

    assert CALL in allowed(matcher)
    assert matcher.accept(CALL)
    assert allowed(matcher) == {ord("f")}
    assert accept(matcher, b"f:23</f>")
    assert matcher.is_accepting()


def test_an_output_ends_only_where_the_grammar_accepts(name) -> None:
    matcher = compiled(name, GrammarSpec("regex", "ab?")).matcher()

    assert not matcher.is_accepting()
    assert matcher.accept(ord("a"))
    assert matcher.is_accepting()
    assert not matcher.is_terminated()
    assert matcher.accept(ord("b"))
    assert matcher.is_accepting()
    assert matcher.is_terminated()
    assert not matcher.accept(ord("b"))
    assert matcher.error() == ""
    matcher.rollback(2)
    assert not matcher.is_accepting()
    assert not matcher.is_terminated()


def test_forced_text_is_what_must_come(name) -> None:
    matcher = compiled(name, GrammarSpec("regex", 'key="(red|rose)"')).matcher()

    assert matcher.forced() == b'key="r'
    assert accept(matcher, b'key="r')
    assert matcher.forced() == b""
    assert matcher.accept(ord("e"))
    assert matcher.forced() in (b"d", b'd"')
    matcher.rollback(2)
    assert matcher.forced() == b"r"


INSIDE_CHARACTERS = [
    (GrammarSpec("json_schema", '{"enum": ["\\u00e9", "\\u00fc"]}'), b'"\xc3', ['"é"', '"ü"']),
    (GrammarSpec("choice", '["東京", "大阪"]'), b"\xe6\x9d\xb1", ["東京", "大阪"]),
    (GrammarSpec("choice", '["日本", "日光"]'), b"\xe6\x97\xa5", ["日本", "日光"]),
    (GrammarSpec("regex", "[é-ü]"), b"\xc3", ["é", "ü", "ï"]),
    (GrammarSpec("regex", "[😀-😏]{2}"), b"\xf0\x9f\x98", ["😀😏"]),
    (GrammarSpec("ebnf", 'root ::= "é" | "ü"'), b"\xc3", ["é", "ü"]),
]


@pytest.mark.parametrize(("spec", "start", "texts"), INSIDE_CHARACTERS, ids=lambda x: str(x)[-30:])
def test_alternatives_may_differ_inside_a_character(name, spec, start, texts) -> None:
    grammar = compiled(name, spec)

    forced = grammar.matcher().forced()
    assert start.startswith(forced)
    assert all(text.encode().startswith(forced) for text in texts)
    for text in texts:
        matcher = grammar.matcher()
        for byte in text.encode():
            assert matcher.forced().startswith(bytes([byte])[: len(matcher.forced())])
            assert matcher.accept(byte)
        assert matcher.is_accepting()


ENDLESS = [
    GrammarSpec("ebnf", 'root ::= "a" root'),
    GrammarSpec("ebnf", 'root ::= "b" ("a"{90000})'),
    GrammarSpec("regex", "a{600}b"),
]


@pytest.mark.parametrize("spec", ENDLESS, ids=lambda s: s.text)
def test_forced_text_is_found_in_bounded_pieces(name, spec) -> None:
    matcher = compiled(name, spec).matcher()

    piece = matcher.forced()

    assert 256 <= len(piece) <= 1 << 16
    if accept(matcher, piece):
        assert matcher.forced()[:1] in (b"a", b"")
    else:  # a limit of the library ends this output alone
        assert "limit" in matcher.error()


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_json_may_be_pretty(name, indent) -> None:
    if name == "outlines_core" and indent:
        pytest.skip("one space at most")
    matcher = compiled(name, SCHEMA).matcher()

    assert accept(matcher, json.dumps({"name": "x y", "age": 3}, indent=indent).encode())
    assert matcher.is_accepting()


def test_no_output_fills_with_white_space(name) -> None:
    matcher = compiled(name, SCHEMA).matcher()

    assert matcher.accept(ord("{"))
    written = 0
    while matcher.accept(ord("\n")) or matcher.accept(ord(" ")):
        written += 1
        assert written < 100


@pytest.mark.parametrize("count", [1, 2, 7])
def test_masks_of_several_are_those_of_each(name, count) -> None:
    grammar = compiled(name, GrammarSpec("regex", "[a-c]{3}|zz(x|y)"))
    matchers = [grammar.matcher() for _ in range(count)]
    for i, matcher in enumerate(matchers):
        assert accept(matcher, (b"ab", b"zz", b"", b"abc")[i % 4])
    rows = [2 * i + 1 for i in range(count)]
    bits = np.full((2 * count + 2, vocabulary().words), 5, np.int32)

    type(matchers[0]).fill_masks(matchers, bits, rows)

    found = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    for matcher, row in zip(matchers, rows, strict=True):
        assert set(np.flatnonzero(found[row]).tolist()) - {END} == allowed(matcher)
    assert (bits[::2] == 5).all()


TEXTS = ["[a-c]{3}", "zz(x|y)?", "(yes|no) the", "[0-9]+"]


def masks_of_steps(name: str) -> list[list[bytes]]:
    """Masks of a batch, step by step; each output continues with the smallest id."""
    grammars = {f"{i}": compiled(name, GrammarSpec("regex", t)) for i, t in enumerate(TEXTS)}
    matchers = Matchers(grammars, vocabulary, len(TOKENS), jumps=False)
    nothing = np.zeros(0, np.int32)
    for slot, text in enumerate(TEXTS):
        request = GenerateRequest(
            rid=f"{slot}",
            input_ids=np.zeros(2, np.int32),
            output_ids=nothing,
            sampling=SamplingParams(max_new_tokens=9, regex=text),
            eos_ids=(END,),
        )
        matchers.join(slot, request, nothing)
    slots = np.arange(len(TEXTS), dtype=np.int32)
    params, steps = SamplingSlots(len(TEXTS), len(TOKENS)), []
    for position in range(2, 5):
        batch = SamplingBatch(slots, np.full(len(TEXTS), position), params)
        assert matchers.prepare(batch.slots, batch.positions)
        masks = matchers.masks(batch)
        assert masks.rows.tolist() == slots.tolist()
        bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
        steps.append([row.tobytes() for row in masks.bits])
        matchers.advance(batch, bits.argmax(axis=1).astype(np.int32))
    matchers.close()
    return steps


def test_masks_are_the_same_before_and_beside_the_forward_pass(name, monkeypatch) -> None:
    ways = []
    for beside in (False, True):
        monkeypatch.setattr(Overlap, "beside", lambda self, num_masks, way=beside: way)
        ways.append(masks_of_steps(name))

    assert ways[0] == ways[1]
    assert len({mask for step in ways[0] for mask in step}) > len(TEXTS)


def test_tokens_are_accepted_up_to_the_first_that_is_not_allowed(name) -> None:
    matcher = compiled(name, GrammarSpec("regex", "abc(d|e)")).matcher()

    assert matcher.accept_all([]) == 0
    assert matcher.accept_all([ord("a"), ord("b"), ord("x"), ord("c")]) == 2
    assert allowed(matcher) == {ord("c")}
    assert matcher.accept_all([ord("c"), ord("e")]) == 2
    assert matcher.is_terminated()


BAD = [
    GrammarSpec("json_schema", '{"type": "nope"}'),
    GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'),
    GrammarSpec("json_schema", "{"),
    GrammarSpec("json_schema", "[1]"),
    GrammarSpec("regex", "(a"),
    GrammarSpec("regex", "[b-a]"),
    GrammarSpec("choice", "[]"),
    GrammarSpec("choice", '["a", 1]'),
    GrammarSpec("ebnf", 'root ::= "a" | b'),
    GrammarSpec("ebnf", "nonsense"),
    GrammarSpec("structural_tag", "{}"),
    GrammarSpec("structural_tag", '{"format": {"type": "wrong"}}'),
    GrammarSpec("structural_tag", '{"structures": [{"begin": "a"}], "triggers": ["b"]}'),
]


@pytest.mark.parametrize("spec", BAD, ids=lambda s: f"{s.kind}:{s.text}")
def test_a_bad_grammar_is_refused_with_its_kind_and_a_reason(name, spec) -> None:
    with pytest.raises(RequestError) as caught:
        backend(name).compile(spec)

    assert caught.value.param == spec.kind
    assert str(caught.value).startswith(spec.kind)
    assert caught.value.status == 400


def test_what_another_version_dumped_is_refused_if_detectable(name) -> None:
    if name in ("llguidance", "combined"):
        pytest.skip("its dump is the grammar's text")

    with pytest.raises(RequestError):
        backend(name).load(b"nonsense")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), name=st.sampled_from(NAMES), number=st.integers(0, len(CASES) - 1)
)
def test_rolling_back_is_as_if_it_never_was(seed, name, number) -> None:
    spec, rng = CASES[number][0], random.Random(seed)
    try:
        grammar = backend(name).compile(spec)
    except RequestError:
        return
    matcher, taken = grammar.matcher(), []
    for _ in range(30):
        ids = sorted(allowed(matcher))
        if rng.random() < 0.3 and taken:
            count = rng.randrange(1, len(taken) + 1)
            matcher.rollback(count)
            del taken[-count:]
        elif ids and not matcher.is_terminated():
            taken.append(rng.choice(ids))
            assert matcher.accept(taken[-1])
        fresh = grammar.matcher()
        assert all(fresh.accept(token) for token in taken)
        assert allowed(fresh) == allowed(matcher)
        assert fresh.is_accepting() == matcher.is_accepting()
        assert fresh.is_terminated() == matcher.is_terminated()
        assert fresh.forced() == matcher.forced()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(NAMES))
def test_forced_text_is_the_only_way(seed, name) -> None:
    rng = random.Random(seed)
    matcher = backend(name).compile(SCHEMA).matcher()
    for _ in range(20):
        forced, ids = matcher.forced(), sorted(allowed(matcher))
        for token in ids:
            text = TOKENS[token]
            assert forced.startswith(text[: len(forced)]), (forced, text)
        if not ids:
            return
        assert matcher.accept(rng.choice(ids))


SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"anyOf": [{"type": "boolean"}, {"const": "x"}]},
    {"type": "number"},
    {
        "$defs": {
            "leaf": {"type": "object", "properties": {"v": {"type": "null"}}, "required": ["v"]}
        },
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "maxItems": 2,
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_is_generated_validates(name, schema) -> None:
    validator = importlib.import_module("jsonschema_rs").validator_for(schema)
    try:
        grammar = backend(name).compile(GrammarSpec("json_schema", json.dumps(schema)))
    except RequestError:
        pytest.skip("the library does not support it")
    finished = 0
    for seed in range(8):
        text = write(grammar.matcher(), random.Random(seed))
        if text is not None:
            finished += 1
            value = json.loads(text.decode("utf-8", "replace"))
            assert validator.is_valid(value), text
    assert finished


VALUES = [{}, {"a": "x"}, {"a": 1}, [], [1], ["x"], "", "x", 1, 0, -1.5, True, None]
KINDS = ["object", "array", "string", "integer", "number", "boolean", "null", ["array", "null"]]
KEYWORDS = [
    {"properties": {"a": {"type": "string"}}},
    {"properties": {}},
    {"prefixItems": [{"type": "integer"}]},
    {"items": {"type": "integer"}},
    {"additionalProperties": {"type": "integer"}},
    {"required": ["a"]},
    {"minItems": 1},
    {"maxLength": 0},
    {"minimum": 1},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("keyword", KEYWORDS, ids=json.dumps)
def test_keywords_of_other_types_say_nothing_of_a_type(name, kind, keyword) -> None:
    closed = {"items": {"type": "integer"}, "additionalProperties": {"type": "integer"}}
    schema = {"type": kind, **closed, **keyword}
    validator = importlib.import_module("jsonschema_rs").validator_for(schema)
    try:
        grammar = backend(name).compile(GrammarSpec("json_schema", json.dumps(schema)))
    except RequestError as error:
        pytest.skip(str(error))

    held = []
    for value in VALUES:
        matcher = grammar.matcher()
        text = json.dumps(value, separators=(",", ":"))
        if accept(matcher, text.encode()) and matcher.is_accepting():
            held.append(value)
    assert held
    assert [value for value in held if not validator.is_valid(value)] == []


@pytest.mark.parametrize(
    ("schema", "bad"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
        ({"type": "integer", "not": {"const": 3}}, "3"),
        ({"type": "array", "contains": {"const": 1}}, "[2]"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "4"),
        ({"type": "integer", "multipleOf": 3}, "4"),
        ({"anyOf": [{"type": "integer", "minimum": 5}]}, "4"),
    ],
    ids=json.dumps,
)
def test_a_keyword_is_enforced_or_refused(name, schema, bad) -> None:
    try:
        grammar = backend(name).compile(GrammarSpec("json_schema", json.dumps(schema)))
    except RequestError:
        return
    matcher = grammar.matcher()
    assert not (accept(matcher, bad.encode()) and matcher.is_accepting())


def in_tag(schema: object, *, old: bool) -> GrammarSpec:
    if old:
        tag = {"begin": "<t>", "schema": schema, "end": "</t>"}
        value = {"structures": [tag], "triggers": ["<t>"], "at_least_one": True}
    else:
        content = {"type": "json_schema", "json_schema": schema}
        value = {"format": {"type": "tag", "begin": "<t>", "content": content, "end": "</t>"}}
    return GrammarSpec("structural_tag", json.dumps(value))


def refusal(name: str, spec: GrammarSpec) -> RequestError | None:
    try:
        backend(name).compile(spec)
    except RequestError as caught:
        error = caught
    else:
        return None
    assert (error.param, error.status) == (spec.kind, 400)
    return error


KEYWORDS = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,2]", "[1,1]"),
    ({"type": "integer", "not": {"const": 3}}, "4", "3"),
    ({"type": "array", "contains": {"const": 1}}, "[1]", "[2]"),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "5", "4"),
    ({"type": "integer", "multipleOf": 3}, "6", "4"),
    ({"minimum": 5}, "5", "4"),
    ({"type": "string", "minLength": 2, "pattern": "^a*$"}, '"aa"', '"a"'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1.5", "1"),
    ({"type": "object", "properties": {"a": {"format": "zzz"}}}, '{"a":1}', '{"a":01}'),
    ({"type": "object", "minProperties": 2}, '{"a":1,"b":1}', '{"a":1}'),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, '{"b":1}', '{"a":1}'),
    ({"type": "array", "prefixItems": [{"type": "null"}]}, "[null,1]", "[1]"),
    ({"$defs": {"n": {"minimum": 2, "type": "integer"}}, "$ref": "#/$defs/n"}, "2", "1"),
    (PERSON, '{ "name" : "x", "age" : 1 }', '{"age":1,"name":"x"}'),
    (True, '[{"a": 1}]', "[1"),
]


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize(("schema", "good", "bad"), KEYWORDS, ids=lambda x: json.dumps(x)[:50])
def test_a_schema_in_a_tag_is_held_or_refused_like_one_alone(name, schema, good, bad, old) -> None:
    if name == "outlines_core":
        pytest.skip("it has no structural tags")
    spec = in_tag(schema, old=old)
    alone = refusal(name, GrammarSpec("json_schema", json.dumps(schema)))

    if alone is not None:
        place = "#/structures/0/schema" if old else "#/format/content/json_schema"
        wanted = str(alone).replace("json_schema: #", f"structural_tag: {place}", 1)
        assert str(refusal(name, spec)) == wanted
        return
    grammar = backend(name).compile(spec)
    matcher = grammar.matcher()
    assert accept(matcher, f"<t>{good}</t>".encode())
    assert matcher.is_accepting()
    assert not accept(grammar.matcher(), f"<t>{bad}</t>".encode())


def test_some_schemas_in_tags_are_held_and_some_refused(name) -> None:
    if name == "outlines_core":
        pytest.skip("it has no structural tags")
    refused = [refusal(name, in_tag(schema, old=False)) is not None for schema, _, _ in KEYWORDS]

    assert 1 <= sum(refused) <= len(refused) - 5


def test_no_schema_in_a_tag_fills_with_white_space(name) -> None:
    if name == "outlines_core":
        pytest.skip("it has no structural tags")
    matcher = compiled(name, in_tag(PERSON, old=False)).matcher()

    assert accept(matcher, b"<t>{")
    written = 0
    while matcher.accept(ord("\n")) or matcher.accept(ord(" ")):
        written += 1
        assert written < 100


@pytest.mark.skipif("xgrammar" not in NAMES, reason="xgrammar is not installed")
def test_what_the_other_styles_of_tags_would_ignore_is_refused() -> None:
    def styled(of_k: object, **extra: object) -> GrammarSpec:
        schema = {"type": "object", "properties": {"k": of_k}, "required": ["k"]}
        content = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml", **extra}
        tag = {"type": "tag", "begin": "<t>", "content": content, "end": "</t>"}
        return GrammarSpec("structural_tag", json.dumps({"format": tag}))

    grammar = backend("xgrammar").compile(styled({"type": "integer", "minimum": 5}))
    good, bad = (b"<t><parameter=k>%d</parameter></t>" % n for n in (7, 4))
    assert accept(grammar.matcher(), good)
    assert not accept(grammar.matcher(), bad)
    places = [
        (styled({"type": "string", "minLength": 2}), "/json_schema/properties/k/minLength"),
        (styled({"type": "null"}, any_order=True), "/any_order"),
        (styled({"type": "null"}, excludes=["x"]), "/excludes"),
    ]
    for spec, place in places:
        assert f"structural_tag: #/format/content{place} is" in str(refusal("xgrammar", spec))
        assert "llguidance" in str(refusal("llguidance", spec))  # it has no such styles


def test_what_lark_has_no_words_for_is_refused() -> None:
    text = {"type": "any_text", "max_tokens": 3}
    spec = GrammarSpec(
        "structural_tag", json.dumps({"format": {"type": "optional", "content": text}})
    )

    message = "structural_tag: #/format/content/max_tokens is not supported by grammar.backend"
    assert str(refusal("llguidance", spec)) == f"{message} llguidance"


def of_a(schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"x": {"type": "null"}, "a": schema}}


PLACES = [
    (of_a({"type": "nope"}), "#/properties/a/type", "nope"),
    (of_a({"type": "array", "uniqueItems": True}), "#/properties/a/uniqueItems", "uniqueItems"),
    (of_a({"$ref": "#/nowhere"}), "#/properties/a/$ref", ""),
    (of_a({"type": "string", "pattern": "(a"}), "#/properties/a/pattern", ""),
    (of_a({"not": {"type": "integer"}}), "#/properties/a/not", "numbers that are not integers"),
    (of_a(7), "#/properties/a", ""),
    ({"type": "object", "properties": 5}, "#/properties", "object"),
    ({"type": "array", "items": of_a({"type": "a/b"})}, "#/items/properties/a/type", "a/b"),
    (of_a({"anyOf": [{"type": "null"}, {"type": "x"}]}), "#/properties/a/anyOf/1/type", "x"),
    ({"$defs": {"n": {"type": "y"}}, **of_a({"$ref": "#/$defs/n"})}, "#/$defs/n/type", "y"),
    ({"type": "object", "properties": {"a/b~": {"type": "z"}}}, "#/properties/a~1b~0/type", "z"),
    (of_a({"not": {"format": "date"}}), "#/properties/a/not", "format"),
    ({"$ref": "#"}, "#/$ref", "matches no text"),
    (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "#/$defs/b/$ref",
        "matches no text",
    ),
    (of_a({}) | {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#/properties/a/$ref", ""),
]


@pytest.mark.parametrize("place", ["alone", "in a tag"])
@pytest.mark.parametrize(("schema", "at", "reason"), PLACES, ids=lambda x: json.dumps(x)[:60])
def test_a_refusal_says_where_in_the_schema(name, schema, at, reason, place) -> None:
    if place == "alone":
        found = refusal(name, GrammarSpec("json_schema", json.dumps(schema)))
        assert str(found).startswith(f"json_schema: {at}")
    elif name == "outlines_core":
        pytest.skip("it has no structural tags")
    else:
        found = refusal(name, in_tag(schema, old=True))
        assert str(found).startswith(f"structural_tag: #/structures/0/schema{at[1:]}")
    assert reason in str(found)


def test_the_search_for_the_place_is_bounded(name) -> None:
    """Beyond the bound, the place is what the fault is in."""
    wide = {f"p{i}": {"type": "null"} for i in range(5000)} | {"a": {"type": "nope"}}
    near = {"type": "object", "properties": dict(reversed(wide.items()))}
    far = {"type": "object", "properties": wide}

    found = [str(refusal(name, GrammarSpec("json_schema", json.dumps(s)))) for s in (near, far)]

    assert found[0].startswith("json_schema: #/properties/a/type")
    assert found[1].startswith("json_schema: #")
    assert all("nope" in message for message in found)


@pytest.mark.parametrize(
    ("kind", "text", "places"),
    [
        ("regex", "ab(a", r"position [345]"),
        ("regex", "a/b/[b-a]", r"position [67]|lower bound"),
        ("regex", "x" * 20_000 + "[b-a]", r"position 2000[23]|lower bound"),
        ("ebnf", 'root ::= "a"\nb ::= [0-9]\nc ::= (b |\nd ::= "x', r"line [34]"),
        ("ebnf", 'root ::= "a" b\n\nb ::= [z-a]', r"line 3"),
        ("ebnf", 'root ::= "a"\nb-c ::= )', r"line 2"),
        ("ebnf", 'root ::= "a" |\n  b', r"line [12]"),
    ],
)
def test_a_refusal_says_where_in_the_text(name, kind, text, places) -> None:
    if name == "outlines_core" and kind == "ebnf":
        pytest.skip("it has no EBNF")
    key = {"regex": "pattern", "ebnf": "grammar"}[kind]
    tag = {"type": {"ebnf": "grammar"}.get(kind, kind), key: text}
    tags = {"format": {"type": "sequence", "elements": [{"type": "any_text"}, tag]}}

    found = str(refusal(name, GrammarSpec(kind, text)))
    assert re.search(places, found), found
    assert "start:" not in found  # no part of the converted grammar
    if name != "outlines_core":
        inner = str(refusal(name, GrammarSpec("structural_tag", json.dumps(tags))))
        assert inner == found.replace(kind, f"structural_tag: #/format/elements/1/{key}", 1)


XML = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
STYLED = GrammarSpec(
    "structural_tag",
    json.dumps({"format": {"type": "qwen_xml_parameter", "json_schema": XML}}),
)
"""Only xgrammar holds it."""


@pytest.mark.skipif("xgrammar" not in NAMES, reason="xgrammar is not installed")
def test_what_the_first_library_cannot_do_the_second_does() -> None:
    both = make_backend("combined")
    cases = [
        (SCHEMA, '{"name":"x","age":1}'),
        (STYLED, "<parameter=a>1</parameter>"),
        (GrammarSpec("structural_tag", json.dumps(SEQUENCE)), "Az<t></t>"),
    ]
    libraries = []
    for spec, text in cases:
        made = both.compile(spec)
        again = make_library(made.library, vocabulary()).load(made.dump())
        libraries.append(made.library)
        assert all(accept(grammar.matcher(), text.encode()) for grammar in (made, again))

    assert libraries == ["llguidance", "xgrammar", "llguidance"]
    with pytest.raises(RequestError, match="nope"):  # invalid: no other backend is tried
        both.compile(GrammarSpec("json_schema", '{"type": "nope"}'))


def test_a_vocabulary_knows_what_is_no_text() -> None:
    assert {END, CALL, len(TOKENS) - 1} <= set(vocabulary().non_text_ids().tolist())
