"""Kinds of JSON values: the types of JSON Schema, with integers apart from other numbers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from sylvan.runtime.features.grammar.schema import Schema, resolve

Kinds = frozenset[str]

FRACTION = "fraction"  # a number that is not an integer
NUMBERS = frozenset({"integer", FRACTION})
ALL: Kinds = frozenset({"null", "boolean", "string", "array", "object", *NUMBERS})
_MAX_DEPTH = 8  # nesting limit of references and schemas

_BY_TYPE: Mapping[str, Kinds] = {
    **{name: frozenset({name}) for name in ALL - {FRACTION}},
    "number": NUMBERS,
}


def kind_of(value: Any) -> str:
    """The kind of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else FRACTION
    return {str: "string", list: "array", dict: "object"}[type(value)]


def kinds_of_types(types: Any) -> Kinds:
    """Return the kinds that `type` allows; all, if it is invalid."""
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not all(name in _BY_TYPE for name in names):
        return ALL
    return frozenset[str]().union(*(_BY_TYPE[name] for name in names))


def types_of_kinds(kinds: Set[str]) -> str | list[str] | None:
    """Return the `type` of exactly these kinds; None if there is none."""
    if FRACTION in kinds and "integer" not in kinds:
        return None
    names = sorted(kinds - {FRACTION, "integer"} if FRACTION in kinds else kinds)
    names += ["number"] if FRACTION in kinds else []
    return names[0] if len(names) == 1 else names


def kinds_of(schema: Any, root: Schema, depth: int = _MAX_DEPTH) -> Kinds:
    """Return kinds that may contain valid values; never omits one that does."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or not depth:
        return ALL
    found = kinds_of_types(schema["type"]) if "type" in schema else ALL
    if "const" in schema:
        found &= {kind_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= frozenset(map(kind_of, schema["enum"]))
    if "$ref" in schema:
        found &= kinds_of(resolve(root, schema["$ref"]), root, depth - 1)
    for part in _list(schema, "allOf"):
        found &= kinds_of(part, root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema, key):
            found &= ALL & frozenset[str]().union(*(kinds_of(p, root, depth - 1) for p in parts))
    return found


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
