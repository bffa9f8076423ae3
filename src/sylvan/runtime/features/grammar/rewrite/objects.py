"""Rules for property names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from sylvan.runtime.features.grammar.rewrite.context import RewriteContext, UndecidedError, any_of
from sylvan.runtime.features.grammar.rewrite.formats import PATTERNS
from sylvan.runtime.features.grammar.rewrite.kinds import ALL, Kinds, types_of_kinds
from sylvan.runtime.features.grammar.schema import Schema

MAX_OPTIONAL = 6
"""Most optional properties for which `maxProperties` enumerates the combinations."""

_STRING: Kinds = frozenset({"string"})
_OBJECT: Kinds = frozenset({"object"})
_MAX_REFS = 8
_LENGTHS = frozenset({"minLength", "maxLength"})
_KNOWN = frozenset({"$ref", "anyOf", "const", "enum", "format", "not", "pattern", *_LENGTHS})
_OTHERS = frozenset({"allOf", "oneOf", "if"})


@dataclass(frozen=True, slots=True)
class _Names:
    """Names, and name patterns, one of which a name must match."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


def without_property_names(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`propertyNames`: allow properties of these names or patterns only."""
    schema = node["propertyNames"]
    for _ in range(_MAX_REFS):
        if isinstance(schema, dict) and "$ref" in schema and not _constraints(schema) - {"$ref"}:
            schema = context.follow(schema["$ref"])
    if schema is False:
        return {"maxProperties": 0}
    if schema is True or not _constraints(schema):
        return True
    found = _names(schema, context)
    named = {
        "properties": dict.fromkeys(found.names, True),
        "patternProperties": dict.fromkeys(found.patterns, True),
    }
    return {**{key: value for key, value in named.items() if value}, "additionalProperties": False}


def _constraints(schema: Mapping[str, Any]) -> frozenset[str]:
    said = (_KNOWN | _OTHERS) & schema.keys()
    named = schema.get("type", "string")
    return said if named == "string" or "string" in named else said | {"type"}


def _names(schema: Any, context: RewriteContext) -> _Names:
    said = _constraints(schema) if isinstance(schema, dict) else frozenset({"schema"})
    if "type" in said:
        return _Names()
    if said in ({"const"}, {"enum"}):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return _Names(names=tuple(v for v in values if isinstance(v, str)))
    if said == {"not"}:
        return _names(context.deny(schema["not"], _STRING), context)
    if said == {"anyOf"}:
        found = [_names(part, context) for part in schema["anyOf"]]
        names = tuple(dict.fromkeys(n for part in found for n in part.names))
        patterns = tuple(dict.fromkeys(p for part in found for p in part.patterns))
        return _Names(names, patterns)
    return _Names(patterns=(_pattern(schema, said),))


def _pattern(schema: Any, said: frozenset[str]) -> str:
    """Return the pattern of all valid names."""
    if said == {"pattern"}:
        return schema["pattern"]
    if said == {"format"} and schema["format"] in PATTERNS:
        return PATTERNS[schema["format"]]
    if said and said <= _LENGTHS:
        least, limit = schema.get("minLength", 0), schema.get("maxLength", "")
        return f"^[\\s\\S]{{{least},{limit}}}$"
    raise UndecidedError("propertyNames of this form")


def without_min_properties(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`minProperties: 1` beside known names: one of them, or none of them and another one."""
    optional = _optional(node)
    if not optional or node["minProperties"] != 1:
        return None
    context.budget.spend(len(optional) ** 2)
    found = [{"properties": {name: True}, "required": [name]} for name in optional]
    other = {"properties": dict.fromkeys(optional, False), "minProperties": 1}
    return _objects(within, any_of([*found, other]))


def without_max_properties(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`maxProperties` beside known names: one alternative per combination of them."""
    optional, limit = _optional(node), node["maxProperties"]
    if not optional or not isinstance(limit, int | float):
        return None
    if len(optional) > MAX_OPTIONAL:
        raise UndecidedError(f"maxProperties beside more than {MAX_OPTIONAL} optional properties")
    required = node.get("required", [])
    found: list[Any] = []
    for chosen in product((True, False), repeat=len(optional)):
        there = [name for name, is_there in zip(optional, chosen, strict=True) if is_there]
        if len(there) + len(required) <= limit:
            named = dict(zip(optional, chosen, strict=True))
            found.append({"properties": named, "required": there, "maxProperties": limit})
    context.budget.spend(len(found) * len(optional))
    return _objects(within, any_of(found))


def _optional(node: Schema) -> list[str]:
    """Return the optional known names, of objects that may have others."""
    properties, required = node.get("properties"), node.get("required", [])
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if closed or not isinstance(properties, dict) or not isinstance(required, list):
        return []
    return [n for n, part in properties.items() if part is not False and n not in required]


def _objects(within: Kinds, schema: Any) -> Any:
    """Return a schema for objects, under which other values may be invalid."""
    if within <= _OBJECT:
        return schema
    parts = schema["anyOf"] if isinstance(schema, dict) and "anyOf" in schema else [schema]
    only = [{"type": "object", **part} for part in parts if part is not False]
    return any_of([{"type": types_of_kinds(ALL - _OBJECT)}, *only])
