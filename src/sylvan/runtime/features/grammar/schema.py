"""JSON schemas as data: what they refer to, and whether two of them can share a value."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.spec import GrammarSpec

Schema = Mapping[str, Any]

_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_MAX_REFS = 8  # followed in a row
_MAX_DEPTH = 8  # of properties that tell schemas apart


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


def walk(schema: Any, path: str = "json_schema") -> Iterator[tuple[str, Schema]]:
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


def counts_on_names(node: Schema) -> bool:
    """Whether `minProperties` could be reached by writing one name twice, which adds nothing."""
    least, closed = node.get("minProperties"), node.get("additionalProperties") is False
    if not isinstance(least, int | float) or (closed and "patternProperties" not in node):
        return False
    return least > max(1, len(_strings(node.get("required"))))


def resolve(root: Schema, ref: Any) -> Any:
    """The schema at `#` or `#/a/pointer`; None if it is elsewhere or not there."""
    if ref == "#":
        return root
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    node: Any = root
    for part in unquote(ref[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if isinstance(node, dict | bool) else None


def types_of_value(value: Any) -> set[str]:
    """Names of the types that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    return {str: {"string"}, list: {"array"}, dict: {"object"}}[type(value)]


def are_disjoint(schemas: Sequence[Any], root: Schema) -> bool:
    """Whether it is certain that no value is valid by two of the schemas."""
    pairs = itertools.combinations(schemas, 2)
    return all(_disjoint(a, b, root, _MAX_DEPTH) for a, b in pairs)


def _disjoint(a: Any, b: Any, root: Schema, depth: int) -> bool:
    a, b = _followed(a, root), _followed(b, root)
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict) or not depth:
        return False
    one, other = _types(a), _types(b)
    if one is not None and other is not None and not one & other:
        return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return not values & others
    return _told_apart(a, b, root, depth)


def _told_apart(a: Schema, b: Schema, root: Schema, depth: int) -> bool:
    """Whether some property that both require, of objects, has disjoint schemas."""
    if _types(a) != {"object"} or _types(b) != {"object"}:
        return False
    names = set(_strings(a.get("required"))) & set(_strings(b.get("required")))
    one, other = a.get("properties"), b.get("properties")
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    return any(_disjoint(one.get(n), other.get(n), root, depth - 1) for n in names)


def _followed(schema: Any, root: Schema) -> Any:
    for _ in range(_MAX_REFS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = resolve(root, schema["$ref"])
    return schema


def _types(schema: Schema) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return set().union(*map(types_of_value, values))
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(_strings(named))
    return (names | {"integer"} if "number" in names else names) or None


def _values(schema: Schema) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return {json.dumps(_canonical(value), sort_keys=True) for value in values}


def _canonical(value: Any) -> Any:
    """Numbers that are equal become the same."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items()}
    return value


def _strings(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
