"""Moves schemas with internal references to another place in a larger schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES = frozenset({"const", "enum", "default", "examples"})
_MAX_REFERENCES = 16


def refers(schema: object) -> bool:
    """Whether any part of a schema refers to another by position (`#...`)."""
    if isinstance(schema, Mapping):
        own = schema.get("$ref")
        return (isinstance(own, str) and _is_place(own)) or any(map(refers, schema.values()))
    return isinstance(schema, list) and any(map(refers, schema))


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema behind a reference; the schema itself if it is none; None if it leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return None
        reference = schema.get("$ref")
        if reference is None:
            return schema
        if not isinstance(reference, str) or not _is_place(reference):
            return None
        schema = root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema with references adjusted to its new place `place`, a pointer (`#/...`).

    Parts with their own `$id` stay unchanged, because their references are relative to it.
    """
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            found[key] = place + value[1:] if _is_place(value) else value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _moved(part, place) for name, part in value.items()}
        elif key in _VALUES:
            found[key] = value
        else:
            found[key] = _moved(value, place)
    return found


def _moved(part: object, place: str) -> Any:
    if isinstance(part, Mapping):
        return dict(part) if "$id" in part else moved(part, place)
    return [_moved(item, place) for item in part] if isinstance(part, list) else part


def _is_place(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")
