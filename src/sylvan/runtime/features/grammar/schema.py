"""Operations on JSON schemas: references, traversal, and whether two schemas overlap."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.spec import GrammarSpec

Schema = Mapping[str, Any]
Change = Callable[[Any, tuple[str | int, ...]], Any]

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
_MAX_REFS = 8  # chain of references
_MAX_DEPTH = 8  # of properties that distinguish schemas


_DIALECTS = {
    "draft-03": "http://json-schema.org/draft-03/schema#",
    "draft-04": "http://json-schema.org/draft-04/schema#",
    "draft-06": "http://json-schema.org/draft-06/schema#",
    "draft-07": "http://json-schema.org/draft-07/schema#",
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def in_known_dialect(schema: Schema) -> Schema:
    """Return the schema with a `$schema` URL that validators know.

    A misspelt URL selects the draft that it names, any other URL the latest draft.
    """
    said = schema.get("$schema")
    if said is None or str(said).rstrip("#") in {each.rstrip("#") for each in _DIALECTS.values()}:
        return schema
    rest = {key: value for key, value in schema.items() if key != "$schema"}
    meant = next((each for name, each in _DIALECTS.items() if name in str(said)), None)
    return rest if meant is None else {"$schema": meant, **rest}


def object_schema(spec: GrammarSpec) -> Schema:
    """Return the schema of a spec as an object: `true` becomes the empty schema.

    Raises:
        RequestError: It is invalid, or allows no value; the message names the place.
    """
    schema = spec.json()
    if schema is True:
        return {}
    if schema is False:
        raise RequestError("json_schema: # matches no text at all", param="json_schema")
    if not isinstance(schema, dict):
        raise RequestError("json_schema must be an object", param="json_schema")
    check_endless(schema)
    return schema


def check_endless(schema: Schema) -> None:
    """Reject a schema whose every value would be infinite.

    Raises:
        RequestError: The message names the place.
    """
    at = endless(schema)
    if at is not None:
        message = f"json_schema: {at} refers back to itself without end: it matches no text at all"
        raise RequestError(message, param="json_schema")


def pointer(at: str, *parts: str | int) -> str:
    """Extend a JSON pointer (RFC 6901, section 3)."""
    return "/".join([at, *(str(p).replace("~", "~0").replace("/", "~1") for p in parts)])


def children(node: Schema) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Return the subschemas, with the path to each; definitions last."""
    yield from (((key,), node[key]) for key in _ONE if key in node)
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from (((key, i), part) for i, part in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from (((key, name), part) for name, part in node[key].items())


def with_children(node: Schema, change: Change) -> dict[str, Any]:
    """Return the schema with replaced subschemas; `change` gets each with its path."""
    found = dict(node)
    for key, value in node.items():
        if key in _ONE:
            found[key] = change(value, (key,))
        elif key in _LISTS and isinstance(value, list):
            found[key] = [change(part, (key, i)) for i, part in enumerate(value)]
        elif key in _MAPS and isinstance(value, dict):
            found[key] = {name: change(part, (key, name)) for name, part in value.items()}
    return found


def with_patterns(schema: Any, change: Callable[[str], str]) -> Any:
    """Return the schema with replaced regexes of strings and names."""
    if not isinstance(schema, dict):
        return schema
    found = with_children(schema, lambda part, _: with_patterns(part, change))
    for key in DEFINITIONS:
        if isinstance(found.get(key), dict):
            found[key] = {n: with_patterns(part, change) for n, part in found[key].items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = change(found["pattern"])
    if isinstance(found.get("patternProperties"), dict):
        named = found["patternProperties"].items()
        found["patternProperties"] = {change(name): part for name, part in named}
    return found


def walk(schema: Any, at: str = "#") -> Iterator[tuple[str, Schema]]:
    """Yield all object schemas inside a schema with their places, itself first."""
    stack = [(at, schema)]
    while stack:
        here, node = stack.pop()
        if isinstance(node, dict):
            yield here, node
            stack += [(pointer(here, *steps), part) for steps, part in children(node)]


def endless(root: Schema) -> str | None:
    """Return where a schema requires itself inside each value, so that values are infinite.

    Follows only mandatory parts, so whatever it finds certainly matches nothing.
    """
    under_way: set[int] = {id(root)}
    done: set[int] = set()
    stack = [(root, _required_schemas(root, "#", root))]
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
            stack.append((part, _required_schemas(root, base, part)))
    return None


def _required_schemas(root: Schema, at: str, node: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Return the schemas that a value of `node`, or a part of it, must satisfy.

    Each with its parent and its place.
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
    """Whether `minProperties` could be reached by repeating a name, which adds nothing."""
    least, closed = node.get("minProperties"), node.get("additionalProperties") is False
    if not isinstance(least, int | float) or (closed and "patternProperties" not in node):
        return False
    return least > max(1, len(_strings(node.get("required"))))


def resolve(root: Schema, ref: Any) -> Any:
    """Resolve `#` or `#/a/pointer`; None if it is external or missing."""
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
    """Return the names of a value's types."""
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
    kinds = [found for schema in (a, b) if (found := _types(schema)) is not None]
    shared = set.intersection(*kinds) if kinds else None
    values = [found for schema in (a, b) if (found := _values(schema)) is not None]
    if len(values) == 2:
        return not values[0] & values[1]
    return (
        shared == set()
        or _parts_disjoint(a, b, root, depth - 1)
        or _parts_disjoint(b, a, root, depth - 1)
        or (shared == {"object"} and _properties_disjoint(a, b, root, depth))
    )


def _parts_disjoint(a: Schema, b: Schema, root: Schema, depth: int) -> bool:
    """Whether a further constraint of `a` excludes `b`."""
    for key in ("allOf", "anyOf", "oneOf"):
        parts = a.get(key)
        if isinstance(parts, list) and parts:
            found = (_disjoint(part, b, root, depth) for part in parts)
            if any(found) if key == "allOf" else all(found):
                return True
    return False


def _properties_disjoint(a: Schema, b: Schema, root: Schema, depth: int) -> bool:
    """Whether a required property of objects has disjoint schemas in both."""
    one, other = set(_strings(a.get("required"))), set(_strings(b.get("required")))
    for name in one | other:
        first, second = _property(a, name), _property(b, name)
        if first is False or second is False:
            return True
        if name in one and name in other and _disjoint(first, second, root, depth - 1):
            return True
    return False


def _property(schema: Schema, name: str) -> Any:
    """Return a schema's constraint on a property; True if uncertain."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not closed


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
    return {json.dumps(canonical(value), sort_keys=True) for value in values}


def canonical(value: Any) -> Any:
    """Normalise a value so that equal numbers are identical."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [canonical(v) for v in value]
    if isinstance(value, dict):
        return {k: canonical(v) for k, v in value.items()}
    return value


def _strings(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
