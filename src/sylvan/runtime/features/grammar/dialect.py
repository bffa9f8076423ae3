"""The subset of JSON Schema that a library enforces; the rest is rejected before the library.

Libraries that compile schemas to automata look at one keyword at a time: beside `$ref`,
`const`, `enum` or `anyOf` they ignore every other keyword, and apply keywords of a type only if
the type is named. Ignored keywords could be violated, so such schemas are rejected instead.
Formats count as constraints, as their authors intend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from sylvan.runtime.features.grammar.rewrite import SupportedKeywords
from sylvan.runtime.features.grammar.schema import (
    Schema,
    are_disjoint,
    counts_on_names,
    pointer,
    resolve,
    types_of_value,
)
from sylvan.runtime.features.grammar.spec import NotSupportedError

_FIRST = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OBJECT = frozenset(
    [
        "additionalProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "properties",
        "propertyNames",
        "required",
        "unevaluatedProperties",
    ]
)
_ARRAY = frozenset(
    [
        "contains",
        "items",
        "maxContains",
        "maxItems",
        "minContains",
        "minItems",
        "prefixItems",
        "unevaluatedItems",
        "uniqueItems",
    ]
)
_STRING = frozenset({"format", "maxLength", "minLength", "pattern"})
_NUMBER = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_KEYWORDS: Mapping[str, Set[str]] = {
    "object": _OBJECT,
    "array": _ARRAY,
    "string": _STRING,
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
_TYPED = _OBJECT | _ARRAY | _STRING | _NUMBER
_NEVER = frozenset({"$dynamicRef", "$recursiveRef", "else", "if", "not", "then"})
_EMPTY: Mapping[str, Any] = {
    "minItems": 0,
    "minLength": 0,
    "minProperties": 0,
    "required": [],
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}
"""Values with which keywords have no effect."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Keywords that a library enforces.

    Attributes:
        backend: Its name.
        typed: Keywords by type.
        inferred: Keywords that imply their type, if none is named.
        formats: String formats.
        patterns: Matches regular expressions that only match text valid in JSON strings.
        exclusive: Groups of keywords of which the library applies only one.
        overriding: Keywords that apply whatever type is named, with their own type.
    """

    backend: str
    typed: Mapping[str, Set[str]]
    inferred: Mapping[str, str]
    formats: Set[str]
    patterns: re.Pattern[str]
    exclusive: Sequence[Set[str]]
    overriding: Mapping[str, str] = field(default_factory=dict[str, str])

    def check(self, schema: Schema) -> None:
        """Reject a schema of which something would be ignored.

        Raises:
            NotSupportedError: A keyword is not supported; the message names it and its place.
        """
        _Walk(self, schema).run()


def supported_keywords(dialect: Dialect) -> SupportedKeywords:
    """Return the keywords for which schemas need no rewriting."""
    return SupportedKeywords(dialect.formats, frozenset[str]().union(*dialect.typed.values()))


class _Walk:
    """Visits every schema that applies to a value; definitions only where they are referenced."""

    def __init__(self, dialect: Dialect, root: Schema) -> None:
        self._dialect, self._root = dialect, root
        self._todo: list[tuple[str, Any, str | None]] = [("#", root, None)]
        self._seen: set[int] = set()

    def run(self) -> None:
        while self._todo:
            at, node, kind = self._todo.pop()
            if not isinstance(node, dict) or id(node) in self._seen:
                continue
            self._seen.add(id(node))
            self._node(at, node, kind)

    def _node(self, at: str, node: Schema, kind: str | None) -> None:
        for keyword in sorted(_NEVER & node.keys()):
            raise self._refusal(f"{at}/{keyword}")
        if "$id" in node and node is not self._root:
            raise self._refusal(f"{at}/$id")
        said = {k for k in node if k in _TYPED and not _has_no_effect(node, k)}
        first = [k for k in _FIRST if k in node]
        if first:
            beside = sorted({*first[1:], *said})
            if beside:
                raise self._refusal(f"{at}/{beside[0]}", f"beside {first[0]}")
            self._applicator(at, node, first[0])
            return
        kinds = self._kinds(at, node, said, kind)
        for keyword, own in self._dialect.overriding.items():
            if keyword in node and [*kinds] != [own]:
                raise self._refusal(f"{at}/{keyword}", f"beside another type than {own}")
        for one in kinds:
            self._typed(at, node, one, said & _KEYWORDS.get(one, frozenset()))

    def _kinds(self, at: str, node: Schema, said: Set[str], kind: str | None) -> Sequence[str]:
        """Return the types that the library infers for a schema without `$ref` and the like."""
        named = node.get("type", kind)
        if named is not None:
            return named if isinstance(named, list) else [named]
        inferred = {self._dialect.inferred[k] for k in said if k in self._dialect.inferred}
        if len(inferred) == 1:
            return list(inferred)
        if said:
            raise self._refusal(f"{at}/{min(said)}", "without type")
        return []

    def _applicator(self, at: str, node: Schema, keyword: str) -> None:
        value = node[keyword]
        if keyword == "$ref":
            target = resolve(self._root, value)
            if target is None or "type" in node:
                raise self._refusal(f"{at}/$ref", "to elsewhere" if target is None else "and type")
            self._todo.append((value, target, None))
        elif keyword in ("const", "enum"):
            self._values(at, node, [value] if keyword == "const" else value)
        elif "type" in node:
            raise self._refusal(f"{at}/type", f"beside {keyword}")
        elif isinstance(value, list):
            if keyword == "allOf" and len(value) > 1:
                raise self._refusal(f"{at}/allOf", "of several")
            if keyword == "oneOf" and not are_disjoint(value, self._root):
                raise self._refusal(f"{at}/oneOf", "of schemas that may overlap")
            self._todo += [(pointer(at, keyword, i), part, None) for i, part in enumerate(value)]

    def _values(self, at: str, node: Schema, values: Any) -> None:
        named = node.get("type")
        if named is None or not isinstance(values, list):
            return
        kinds = {named} if isinstance(named, str) else set(named)
        if not all(kinds & types_of_value(value) for value in values):
            raise self._refusal(f"{at}/type", "that some of the values do not have")

    def _typed(self, at: str, node: Schema, kind: str, said: Set[str]) -> None:
        dialect = self._dialect
        for keyword in sorted(said - dialect.typed.get(kind, frozenset())):
            raise self._refusal(f"{at}/{keyword}")
        for group in dialect.exclusive:
            both = sorted(said & group)
            if len(both) > 1:
                raise self._refusal(f"{at}/{both[1]}", f"beside {both[0]}")
        if kind == "string":
            self._string(at, node)
        elif kind == "integer":
            if "multipleOf" in node and not isinstance(node["multipleOf"], int):
                raise self._refusal(f"{at}/multipleOf", "that is not an integer")
        elif kind == "object":
            self._object(at, node)
        elif kind == "array":
            self._todo.append((f"{at}/items", node.get("items"), None))
            for i, part in enumerate(_list(node, "prefixItems")):
                self._todo.append((pointer(at, "prefixItems", i), part, None))

    def _string(self, at: str, node: Schema) -> None:
        if "format" in node and node["format"] not in self._dialect.formats:
            raise self._refusal(f"{at}/format", repr(node["format"]))
        if "pattern" in node:
            self._pattern(f"{at}/pattern", node["pattern"])

    def _pattern(self, at: str, pattern: Any) -> None:
        if not isinstance(pattern, str) or not self._dialect.patterns.fullmatch(pattern):
            raise self._refusal(at, "of this form")

    def _object(self, at: str, node: Schema) -> None:
        properties, patterns = _map(node, "properties"), _map(node, "patternProperties")
        if counts_on_names(node):
            raise self._refusal(f"{at}/minProperties", "of names that are not given")
        unnamed = [r for r in _list(node, "required") if r not in properties]
        if unnamed:
            raise self._refusal(f"{at}/required", f"of {unnamed[0]!r}, which is not a property,")
        if len(patterns) > 1:
            raise self._refusal(f"{at}/patternProperties", "of several patterns")
        for name in properties:
            if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                raise self._refusal(pointer(at, "properties", name), "a name with escapes,")
        for pattern, part in patterns.items():
            self._pattern(pointer(at, "patternProperties", pattern), pattern)
            self._todo.append((pointer(at, "patternProperties", pattern), part, None))
        self._todo += [
            (pointer(at, "properties", name), part, None) for name, part in properties.items()
        ]
        self._todo.append((f"{at}/additionalProperties", node.get("additionalProperties"), None))
        self._todo.append((f"{at}/propertyNames", node.get("propertyNames"), "string"))

    def _refusal(self, at: str, how: str = "") -> NotSupportedError:
        message = f"json_schema: {at} {how}".rstrip() + " is not supported by grammar.backend"
        return NotSupportedError(f"{message} {self._dialect.backend}", param="json_schema")


def _has_no_effect(node: Schema, keyword: str) -> bool:
    value = node[keyword]
    if keyword == "additionalProperties" and "patternProperties" in node:
        return value is False
    return keyword in _EMPTY and value == _EMPTY[keyword]


def _map(node: Schema, key: str) -> Schema:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def _list(node: Schema, key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
