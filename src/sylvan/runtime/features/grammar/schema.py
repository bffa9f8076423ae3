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

_ONE = (
    "items",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    *(DEFINITIONS := ("$defs", "definitions")),
)
_MAX_REFS = 8  # followed in a row
_MAX_DEPTH = 8  # of properties that tell schemas apart


def object_schema(spec: GrammarSpec) -> Schema:
    """The schema of a spec as an object: `true` allows what the empty one does.

    Raises:
        RequestError: it is no schema, or allows no value; names the place.
    """
    schema = spec.json()
    if schema is True:
        return {}
    if schema is False:
        raise RequestError("json_schema: # matches no text at all", param="json_schema")
    if not isinstance(schema, dict):
        raise RequestError("json_schema must be an object", param="json_schema")
    at = endless(schema)
    if at is not None:
        message = f"json_schema: {at} refers back to itself without end: it matches no text at all"
        raise RequestError(message, param="json_schema")
    return schema


def pointer(at: str, *parts: str | int) -> str:
    """A JSON pointer, some steps further down (RFC 6901, section 3)."""
    return "/".join([at, *(str(p).replace("~", "~0").replace("/", "~1") for p in parts)])


def children(node: Schema) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """What stands where schemas of a schema stand, with the steps to it; definitions last."""
    yield from (((key,), node[key]) for key in _ONE if key in node)
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from (((key, i), part) for i, part in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from (((key, name), part) for name, part in node[key].items())


def walk(schema: Any, at: str = "#") -> Iterator[tuple[str, Schema]]:
    """All schemas in a schema that are objects, with their places; itself first."""
    stack = [(at, schema)]
    while stack:
        here, node = stack.pop()
        if isinstance(node, dict):
            yield here, node
            stack += [(pointer(here, *steps), part) for steps, part in children(node)]


def endless(root: Schema) -> str | None:
    """Where a schema asks for itself in a value, in that value again, and so on; None: nowhere.

    Only what every value must have is followed, so that what is found matches nothing for certain.
    """
    under_way: set[int] = {id(root)}
    done: set[int] = set()
    stack = [(root, _musts(root, "#", root))]
    while stack:
        node, rest = stack[-1]
        at, base, part = next(rest, ("", "", None))
        if part is None:
            under_way.discard(id(node))
            done.add(id(node))
            stack.pop()
        elif id(part) in under_way:
            return at
        elif id(part) not in done:
            under_way.add(id(part))
            stack.append((part, _musts(root, base, part)))
    return None


def _musts(root: Schema, at: str, node: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Schemas that a value by `node` has to satisfy, itself or with something in it.

    With who asks for them, and where they stand.
    """
    found: list[tuple[tuple[str | int, ...], Any]] = []
    target = resolve(root, node.get("$ref"))
    if isinstance(target, dict):
        yield pointer(at, "$ref"), node["$ref"], target
    for key in ("allOf", "anyOf", "oneOf"):
        parts = node.get(key)
        if isinstance(parts, list) and (key == "allOf" or len(parts) == 1):
            found += [((key, i), part) for i, part in enumerate(parts)]
    if node.get("type") == "object" and isinstance(node.get("properties"), dict):
        required, properties = _strings(node.get("required")), node["properties"]
        found += [(("properties", n), properties[n]) for n in required if n in properties]
    least = node.get("minItems")
    if node.get("type") == "array" and isinstance(least, int) and least > 0:
        first = node.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        found += [(("prefixItems", i), part) for i, part in enumerate(first)]
        if len(first) < least:
            found.append((("items",), node.get("items")))
    for steps, part in found:
        if isinstance(part, dict):
            here = pointer(at, *steps)
            yield here, here, part


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
