"""Walks JSON schemas, so that keywords a library would ignore are refused instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.spec import GrammarSpec

Schema = Mapping[str, Any]

_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
}


def object_schema(spec: GrammarSpec) -> Schema:
    """The schema of a spec as an object: `true` allows what the empty one does.

    Raises:
        RequestError: it is no schema, or allows no value.
    """
    schema = spec.json()
    if schema is True:
        return {}
    if schema is False:
        raise RequestError("json_schema matches no text at all", param="json_schema")
    if not isinstance(schema, dict):
        raise RequestError("json_schema must be an object", param="json_schema")
    return schema


def refuse_keywords(schema: Any, ignored: Set[str], backend: str) -> None:
    """Refuse a schema that uses a keyword which `backend` would ignore.

    Raises:
        RequestError: names the place and the keyword.
    """
    for path, node in walk(schema):
        for keyword in sorted(ignored & node.keys()):
            value = node[keyword]
            if value in _HARMLESS.get(keyword, ()):
                continue
            if keyword == "allOf" and isinstance(value, list) and len(value) < 2:
                continue
            message = f"{path}.{keyword} is not supported by grammar.backend {backend}"
            raise RequestError(message, param="json_schema")


def walk(schema: Any, path: str = "json_schema") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All schemas in a schema that are objects, with their places; itself first."""
    stack = [(path, schema)]
    while stack:
        at, node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield at, node
        stack += [(f"{at}.{key}", node[key]) for key in _ONE if key in node]
        for key in _LISTS:
            if isinstance(node.get(key), list):
                stack += [(f"{at}.{key}[{i}]", part) for i, part in enumerate(node[key])]
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                stack += [(f"{at}.{key}.{name}", part) for name, part in node[key].items()]
