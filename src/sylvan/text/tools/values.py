"""Converts arguments written as text between tags to JSON, by the types of the schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sylvan.text.tools.events import Calls
from sylvan.text.tools.literals import parse_literal
from sylvan.text.tools.reader import Reader, Sink, Steps
from sylvan.text.tools.references import resolved

_ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_BOOLEAN = frozenset({"boolean"})
_LEADING_ZEROS = re.compile(r"[+-]?\d{1,300}", re.ASCII)
_KINDS = {"null": type(None), "boolean": bool, "object": dict, "array": list, "string": str}


def allowed_types(schema: Any) -> frozenset[str]:
    """JSON types that a schema allows; all if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return _ANY
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if isinstance(kinds, list):
        return frozenset(k for k in kinds if isinstance(k, str)) & _ANY or _ANY
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            return frozenset().union(*map(allowed_types, options))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return (
        frozenset().union(*map(_types_of, values)) if isinstance(values, list) and values else _ANY
    )


def to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of the value that `text` represents; a string if no other type matches."""
    stripped = text.strip()
    if types != frozenset({"string"}):
        value = _parsed(stripped)
        if types == _BOOLEAN and stripped in ("0", "1"):
            value = stripped == "1"
        if "string" not in types and _LEADING_ZEROS.fullmatch(stripped):
            value = int(stripped)
        if "string" not in types or not isinstance(value, str):
            for kind in types & _types_of(value):
                if kind != "string":
                    return _dumped(value, kind)
        if value is None and "string" not in types:
            return "null"  # the model's word for no value, even if not allowed
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(lowered)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return parse_literal(text) if text[:1] in ("{", "[") else text
    except ValueError:
        return text


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        if not math.isfinite(value):
            return frozenset()
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return frozenset(name for name, kind in _KINDS.items() if isinstance(value, kind))


def _dumped(value: Any, kind: str) -> str:
    if kind == "integer" and isinstance(value, float) and abs(value) < 2**53:
        value = int(value)
    return dump(value)


def dump(value: Any) -> str:
    """JSON text of a parsed value, with escapes only where UTF-8 needs them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value)
    return text


class ArgumentsWriter:
    """Writes the arguments of one call as a JSON object, one parameter after the other.

    Strings are streamed; other values are written when complete.

    Args:
        reader: Source of values.
        calls: Receives fragments.
        name: The function, whose schema gives the types.
        trims: Whether values lose one line break at either end.
    """

    def __init__(self, reader: Reader, calls: Calls, name: str, *, trims: bool = False) -> None:
        self._reader = reader
        self._calls = calls
        self._schema = calls.parameters(name)
        self._trims = trims
        self._keys: set[str] = set()

    def types(self, key: str) -> frozenset[str]:
        """JSON types that the schema allows for a parameter."""
        root = resolved(self._schema, self._schema) or {}
        properties = root.get("properties")
        schema = root.get("additionalProperties")
        if isinstance(properties, Mapping) and key in properties:
            schema = properties[key]
        return allowed_types(resolved(schema, self._schema))

    def read(
        self, key: str, ends: Sequence[str], types: frozenset[str] | None = None
    ) -> Steps[str]:
        """Read a value up to one of `ends` and write it; return the end.

        Raises:
            Malformed: the text ends too early; a string is written as far as it arrived.
        """
        if key in self._keys:  # the first one counts
            _, end = yield from self._reader.until(ends)
            return end
        types = self.types(key) if types is None else types
        if types == frozenset({"string"}):
            self._calls.arguments(self._key(key) + '"')
            strip = _LineTrimmer(self._write_text, trims=self._trims)
            _, end = yield from self._reader.until(ends, sink=strip)
            self._calls.arguments('"')
            return end
        text, end = yield from self._reader.until(ends)
        self.write(key, to_json(_trimmed(text) if self._trims else text, types))
        return end

    def write(self, key: str, value_json: str) -> None:
        """Write a parameter whose value is JSON; duplicates are ignored."""
        if key in self._keys:
            return
        self._calls.arguments(self._key(key) + value_json)

    def close(self) -> None:
        """End the object."""
        self._calls.arguments("}" if self._keys else "{}")

    def _key(self, key: str) -> str:
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        return f"{opening}{json.dumps(key, ensure_ascii=False)}: "

    def _write_text(self, text: str) -> None:
        self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class _LineTrimmer:
    """A sink that drops a line break at the start and one at the end."""

    def __init__(self, sink: Sink, *, trims: bool) -> None:
        self._sink = sink
        self._trims = trims
        self._at_start = trims
        self._held = ""

    def __call__(self, text: str) -> None:
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix("\n")
        if self._trims and text:
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._sink(text)


def _trimmed(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
