"""Requirements of a schema for each value in an output, by location."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import jsonschema_rs

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.rewrite.context import Budget
from sylvan.runtime.features.grammar.rewrite.normal import normalised
from sylvan.runtime.features.grammar.schema import (
    Schema,
    children,
    in_known_dialect,
    pointer,
    resolve,
)
from sylvan.runtime.features.grammar.spec import NotSupportedError

EVERYTHING = "*"
"""Instead of a keyword: the grammar may enforce no keyword."""

_ADDRESS = "urn:sylvan:schema"
_MAX_REASON_CHARS = 300
_IN_PLACE = frozenset(
    [
        *("anyOf", "contains", "dependentSchemas", "else", "if", "not", "oneOf", "propertyNames"),
        *("then", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
"""Keywords whose schemas are decided when the value with the keyword closes."""
_COUNTED = ("uniqueItems", "maxItems", "maxProperties")


def check_schema(schema: Schema) -> None:
    """Reject an invalid schema, or one with external references.

    Raises:
        RequestError: The message says where.
    """
    _validator(in_known_dialect(schema))


def _refuse(address: str) -> Any:
    raise ValueError(f"nothing is fetched: {address}")


def _validator(schema: Any, registry: jsonschema_rs.Registry | None = None) -> Any:
    try:
        return jsonschema_rs.validator_for(
            schema, validate_formats=True, registry=registry, retriever=_refuse
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        reason = str(error).partition("\n")[0][:_MAX_REASON_CHARS]
        raise RequestError(f"json_schema: {reason}", param="json_schema") from None


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """Schemas that values at some locations of an output must satisfy.

    Attributes:
        pointers: Pointers to these schemas, including referenced and combined ones.
        guarded: The grammar does not enforce all of them.
    """

    pointers: tuple[str, ...]
    guarded: bool


class Conditions:
    """Maps locations to schemas, and validates values.

    Compared by identity; one per grammar. Methods are for one thread at a time.

    Args:
        schema: As the client wrote it.
        lost: Keywords that the grammar does not enforce everywhere; `EVERYTHING`: any.
    """

    def __init__(self, schema: Schema, lost: Set[str]) -> None:
        schema = in_known_dialect(schema)
        self._whole = _validator(schema)
        self._lost = lost
        try:
            self._root: Schema = normalised(schema, Budget())
        except NotSupportedError:  # schemas below depend on the path to a value
            self._root = {"allOf": []}
            self._lost = frozenset({EVERYTHING})
        self._registry = jsonschema_rs.Registry([(_ADDRESS, dict(self._root))])
        self._places: dict[tuple[str, ...], SchemaPlace] = {}
        self._named: dict[tuple[str, ...], SchemaPlace] = {}  # by query
        self._validators: dict[str, Any] = {}
        self._early: dict[tuple[str, ...], Any] = {}
        self._breakable = functools.cache(self._find_breakable)
        self._matches = functools.cache(self._find_match)
        self.root = self._place(["#"])

    # ---- where

    def member(self, place: SchemaPlace, name: str) -> SchemaPlace:
        """Return the place of the property `name` of an object."""
        return self._place([p for at in place.pointers for p in self._of_member(at, name)])

    def item(self, place: SchemaPlace, index: int) -> SchemaPlace:
        """Return the place of an item of an array."""
        found: list[str] = []
        for at in place.pointers:
            node = self._node(at)
            first = node.get("prefixItems", [])
            if index < len(first):
                found.append(_join_pointer(at, "prefixItems", index))
            elif "items" in node:
                found.append(_join_pointer(at, "items"))
        return self._place(found)

    def _of_member(self, at: str, name: str) -> Iterator[str]:
        node, known = self._node(at), False
        if name in node.get("properties", {}):
            known = True
            yield _join_pointer(at, "properties", name)
        for pattern in node.get("patternProperties", {}):
            if self._matches(pattern, name):
                known = True
                yield _join_pointer(at, "patternProperties", pattern)
        if not known and "additionalProperties" in node:
            yield _join_pointer(at, "additionalProperties")

    def _place(self, pointers: list[str]) -> SchemaPlace:
        asked = tuple(pointers)
        found = self._named.get(asked)
        if found is None:
            found = self._named[asked] = self._joined(pointers)
        return found

    def _joined(self, pointers: list[str]) -> SchemaPlace:
        key = tuple(sorted(self._closure(pointers)))
        found = self._places.get(key)
        if found is None:
            everywhere = EVERYTHING in self._lost
            guarded = everywhere or any(self._breakable(at) for at in key)
            found = self._places[key] = SchemaPlace(key, guarded)
        return found

    def _closure(self, pointers: list[str]) -> set[str]:
        found, stack = set[str](), list(pointers)
        while stack:
            at = stack.pop()
            if at in found:
                continue
            found.add(at)
            node = self._node(at)
            if isinstance(node.get("$ref"), str):
                stack.append(_quoted(node["$ref"]))
            stack += [_join_pointer(at, "allOf", i) for i in range(len(node.get("allOf", [])))]
        return found

    def _node(self, at: str) -> Schema:
        node = resolve(self._root, at)
        return node if isinstance(node, dict) else {}

    # ---- what the grammar does not hold

    def _find_breakable(self, at: str) -> bool:
        """Whether a value may turn out invalid by this schema when it closes."""
        return self._lacks(at) or any(
            self._lacks_below(_join_pointer(at, *steps), frozenset())
            for steps, _ in children(self._node(at))
            if steps[0] in _IN_PLACE
        )

    def _lacks(self, at: str) -> bool:
        return not self._lost.isdisjoint(self._node(at))

    def _lacks_below(self, at: str, seen: frozenset[str]) -> bool:
        """Whether any keyword in a schema, or in what it references, is not enforced."""
        if at in seen:
            return False
        stack, seen_here = [at], set(seen)
        while stack:
            here = stack.pop()
            if here in seen_here:
                continue
            seen_here.add(here)
            if self._lacks(here):
                return True
            node = self._node(here)
            if isinstance(node.get("$ref"), str):
                stack.append(_quoted(node["$ref"]))
            stack += [_join_pointer(here, *steps) for steps, _ in children(node)]
        return False

    def _find_match(self, pattern: str, name: str) -> bool:
        return _validator({"pattern": pattern}).is_valid(name)

    # ---- verdicts

    def check(self, place: SchemaPlace, value: Any) -> str:
        """Return why a value that closed there is invalid; empty if it is valid."""
        if not place.guarded:
            return ""
        for at in place.pointers:
            doubtful = EVERYTHING in self._lost or self._breakable(at)
            if doubtful and (reason := _reason(self._of(at), value)):
                return reason
        return ""

    def check_whole(self, value: Any) -> str:
        """Return why a whole output is invalid by the client's schema."""
        return _reason(self._whole, value)

    def check_begun(self, place: SchemaPlace, value: Any) -> str:
        """Return why an open container can no longer become valid; empty if it can."""
        if not place.guarded:
            return ""
        if place.pointers not in self._early:
            parts = [part for at in place.pointers for part in self._final(at)]
            found = _validator({"allOf": parts}, self._registry) if parts else None
            self._early[place.pointers] = found
        validator = self._early[place.pointers]
        return "" if validator is None else _reason(validator, value)

    def _final(self, at: str) -> Iterator[Schema]:
        """Return violations that more items or properties cannot repair."""
        node = self._node(at)
        for keyword in _COUNTED:
            if keyword in node:
                yield {keyword: node[keyword]}
        if "propertyNames" in node:
            yield {"propertyNames": {"$ref": _ADDRESS + _join_pointer(at, "propertyNames")}}
        if "contains" in node and "maxContains" in node:
            part = {"$ref": _ADDRESS + _join_pointer(at, "contains")}
            yield {"contains": part, "minContains": 0, "maxContains": node["maxContains"]}
        denied = node.get("not")
        if isinstance(denied, dict) and denied.keys() == {"required"}:
            yield {"not": denied}

    def _of(self, at: str) -> Any:
        found = self._validators.get(at)
        if found is None:
            found = _validator({"$ref": _ADDRESS + at}, self._registry)
            self._validators[at] = found
        return found


def _reason(validator: Any, value: Any) -> str:
    """Return why a value is invalid; empty if it is valid."""
    try:
        if validator.is_valid(value):
            return ""
        return _describe(next(validator.iter_errors(value)))
    except ValueError as error:  # a number beyond all limits
        return str(error)


def _describe(error: Any) -> str:
    steps = [str(step) for step in error.evaluation_path if step != "$ref"]
    reason = error.message[:_MAX_REASON_CHARS]
    return f"{'/'.join(steps) or 'the schema'}: {reason}"


def _join_pointer(at: str, *parts: str | int) -> str:
    """Extend a pointer, in the escaping of references."""
    return at + "/".join(
        ["", *(quote(step, safe="~") for step in pointer("", *parts).split("/")[1:])]
    )


def _quoted(reference: str) -> str:
    """Escape a reference as `_join_pointer` does."""
    return "#" + "/".join(quote(unquote(part), safe="~") for part in reference[1:].split("/"))
