"""Rewritten schemas mean the same: the validator of another library says so, on small values."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.rewrite import SupportedKeywords, rewrite
from sylvan.runtime.features.grammar.schema import walk
from sylvan.runtime.features.grammar.spec import NotSupportedError

SUPPORTED = SupportedKeywords(formats=frozenset({"date"}))
GONE = {
    *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
    *("propertyNames", "uniqueItems", "contains", "minContains", "maxContains"),
    *("unevaluatedProperties", "unevaluatedItems", "$anchor", "$id", "$dynamicRef"),
}
NAMES = ["a", "b", "c"]

scalars = st.sampled_from([None, True, False, -1, 0, 1, 2, 0.5, 1.0, "", "a", "b", "ab", 'b"', "c"])
small = st.one_of(scalars, st.lists(scalars, max_size=3))
objects = st.dictionaries(st.sampled_from(NAMES), small, max_size=3)
values = st.one_of(scalars, st.lists(st.one_of(scalars, objects), max_size=4), objects)
names = st.sampled_from(NAMES)
some_names = st.lists(names, max_size=2, unique=True)
counts = st.integers(0, 3)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
TEXTS = ["^a", "^ab$", "b", '^b"$']


def maps(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(names, of, max_size=2)


PLAIN = st.one_of(
    st.booleans(),
    st.builds(lambda t: {"type": t}, types),
    st.builds(lambda t: {"type": t}, st.lists(types, min_size=1, max_size=3, unique=True)),
    st.builds(lambda v: {"const": v}, small),
    st.builds(lambda v: {"enum": v}, st.lists(small, min_size=1, max_size=3)),
    st.builds(lambda n: {"minimum": n}, st.integers(-1, 2)),
    st.builds(lambda n: {"type": "integer", "exclusiveMaximum": n}, st.integers(-1, 2)),
    st.builds(lambda n: {"maxLength": n}, counts),
    st.builds(lambda n: {"type": "string", "minLength": n}, counts),
    st.builds(lambda p: {"pattern": p}, st.sampled_from(TEXTS)),
    st.builds(lambda n: {"required": n}, some_names),
    st.builds(lambda n: {"type": "object", "maxProperties": n}, counts),
    st.builds(lambda n: {"minItems": n}, counts),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A schema with one keyword more, of those that are rewritten mostly."""
    parts = st.lists(inner, min_size=1, max_size=3)
    optional = st.one_of(st.none(), inner)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "properties": maps(inner),
        "required": some_names,
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "maxItems": counts,
        "anyOf": parts,
        "allOf": parts,
        "oneOf": parts,
        "not": inner,
        "dependentRequired": maps(some_names),
        "dependentSchemas": maps(inner),
        "propertyNames": inner,
        "minProperties": counts,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minContains": counts,
        "maxContains": counts,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "type": types,
    }

    def choose(keys: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({key: keywords[key] for key in keys})

    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True)
    branches = st.builds(
        lambda test, then, other: {
            "if": test,
            **({"then": then} if then is not None else {}),
            **({"else": other} if other is not None else {}),
        },
        inner,
        optional,
        optional,
    )
    return st.one_of(chosen.flatmap(choose), branches)


schemas = st.recursive(PLAIN, composed, max_leaves=6).filter(lambda s: isinstance(s, dict))


def validator(schema: Any) -> Any:
    library = importlib.import_module("jsonschema_rs")
    return library.Draft202012Validator(schema)


def keywords_of(schema: Any) -> Iterator[str]:
    for _, node in walk(schema):
        yield from node


def check_same(schema: Any, some: list[Any]) -> None:
    before = validator(schema)
    try:
        found = rewrite(schema, SUPPORTED).schema
    except NotSupportedError:
        event("not decided")
        return
    except RequestError:  # nothing is valid
        assert not any(map(before.is_valid, some))
        return

    event("rewritten" if found is not schema else "as it was")
    after = validator(found)
    assert found is schema or GONE.isdisjoint(keywords_of(found))
    for value in some:
        assert after.is_valid(value) == before.is_valid(value), (value, json.dumps(found))


@settings(max_examples=150, deadline=None)
@given(schemas, st.lists(values, min_size=12, max_size=12))
def test_a_rewritten_schema_means_the_same(schema: Any, some: list[Any]) -> None:
    check_same(schema, some)


REFERRING = st.fixed_dictionaries(
    {"$defs": st.fixed_dictionaries({"x": schemas, "y": PLAIN})},
    optional={
        "properties": maps(st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#"}, True])),
        "oneOf": st.just([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]),
        "not": st.sampled_from([{"$ref": "#/$defs/y"}, {"$ref": "#/$defs/x"}]),
        "unevaluatedProperties": st.booleans(),
        "allOf": st.sampled_from([[{"$ref": "#/$defs/x"}], [{"$ref": "#/$defs/y"}]]),
        "$id": st.just("https://example.org/schema"),
    },
)


@settings(max_examples=150, deadline=None)
@given(REFERRING, st.lists(values, min_size=12, max_size=12))
def test_what_references_mean_is_kept(schema: Any, some: list[Any]) -> None:
    check_same(schema, some)
