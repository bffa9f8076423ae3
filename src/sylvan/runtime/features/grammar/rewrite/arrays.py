"""Rules for arrays whose items depend on each other: enumerate them if there are few."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from sylvan.runtime.features.grammar.rewrite.context import RewriteContext, UndecidedError, any_of
from sylvan.runtime.features.grammar.rewrite.kinds import (
    ALL,
    Kinds,
    kind_of,
    kinds_of_types,
    types_of_kinds,
)
from sylvan.runtime.features.grammar.schema import Schema, canonical

MAX_ARRAYS = 2_000
"""Most constants that `uniqueItems` is enumerated over."""
MAX_PLACES = 32
"""Most leading items among which `contains` chooses one."""
MAX_MARKED = 8
"""The same, if it needs several, or limits their number."""
_FEW = 1  # distinct items

_ARRAY: Kinds = frozenset({"array"})
_VALUES = frozenset({"const", "enum", "type", "$ref"})
_SAYING = frozenset(
    [
        "allOf",
        "anyOf",
        "if",
        "not",
        "oneOf",
    ]
)


def without_unique_items(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`uniqueItems`: enumerate all arrays of distinct values, if items have few."""
    if node["uniqueItems"] is not True:
        return True
    least, limit = _count(node, "minItems", 0), _longest(node)
    if limit is not None and limit <= _FEW:
        return True
    rest = node.get("items", True)
    first = [_values(part, context) for part in node.get("prefixItems", [])]
    tail = _values(rest, context) if limit is None or limit > len(first) else []
    found: list[list[Any]] = []
    for array in _different(first, tail, limit):
        if len(array) >= least:
            found.append(array)
        context.budget.spend(1 + len(array))
        if len(found) > MAX_ARRAYS:
            raise UndecidedError(f"uniqueItems of more than {MAX_ARRAYS} different arrays")
    return _arrays(within, {"enum": found} if found else False)


def _different(
    first: Sequence[Sequence[Any]], tail: Sequence[Any], limit: int | None
) -> Iterator[list[Any]]:
    stack: list[tuple[list[Any], frozenset[str]]] = [([], frozenset())]
    while stack:
        array, used = stack.pop()
        yield array
        if limit is not None and len(array) >= limit:
            continue
        values = first[len(array)] if len(array) < len(first) else tail
        for value in reversed(values):
            key = json.dumps(canonical(value), sort_keys=True)
            if key not in used:
                stack.append(([*array, value], used | {key}))


def _values(schema: Any, context: RewriteContext) -> Sequence[Any]:
    """Return all values that are valid by a schema."""
    if schema is False:
        return []
    if isinstance(schema, dict) and not _SAYING & schema.keys():
        if "$ref" in schema and not (_VALUES - {"$ref"}) & schema.keys():
            target = context.follow(schema["$ref"])
            if isinstance(target, dict) and "$ref" not in target:
                return _values(target, context)
        kinds = kinds_of_types(schema["type"]) if "type" in schema else ALL
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and not {"const", "enum", "$ref"} <= schema.keys():
            if not _limits(schema, {kind_of(value) for value in values}):
                return [value for value in values if kind_of(value) in kinds]
        elif kinds <= {"boolean", "null"}:
            return [*([False, True] if "boolean" in kinds else ()), *([None] * ("null" in kinds))]
    raise UndecidedError("uniqueItems of values that are not given")


def _limits(schema: Schema, kinds: set[str]) -> bool:
    """Whether a schema restricts such values beyond listing them."""
    annotations = {"title", "description", "default", "examples", "$comment", "deprecated"}
    return bool(schema.keys() - _VALUES - annotations) and not kinds <= {"null", "boolean"}


def without_contains(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`contains`: choose which of the first items matches; enumerate the array if it is short."""
    schema, low = node["contains"], _count(node, "minContains", 1)
    high = _count(node, "maxContains", 0) if "maxContains" in node else None
    if high is not None and high < low:
        return _arrays(within, False)
    if low == 0 and high is None:
        return True
    if schema is True and high is None:
        return {"minItems": low}
    places = MAX_PLACES if low == 1 and high is None else MAX_MARKED
    if low > places:
        raise UndecidedError(f"minContains above {places}")
    longest = _longest(node)
    places = places if longest is None else min(places, longest)
    other = True if high is None else context.deny(schema)
    rest = {} if high is None else {"items": other}
    found: list[Any] = []
    for count in range(low, low + 1 if high is None else min(high, places) + 1):
        context.budget.spend(places * math.comb(places, count))
        for marked in combinations(range(places), count):
            length = marked[-1] + 1 if marked else 0
            items = [schema if place in marked else other for place in range(length)]
            if False not in items:
                found.append({**_beginning(items), **rest})
    return _arrays(within, any_of(found))


def _beginning(items: list[Any]) -> dict[str, Any]:
    if not items:
        return {"type": "array"}
    return {"type": "array", "minItems": len(items), "prefixItems": items}


def _arrays(within: Kinds, schema: Any) -> Any:
    """Return a schema for arrays, under which other values may be invalid."""
    if within <= _ARRAY:
        return schema
    return any_of([{"type": types_of_kinds(ALL - _ARRAY)}, schema])


def _longest(node: Schema) -> int | None:
    """Return the largest number of items; None: unlimited."""
    bounds = [_count(node, "maxItems", 0)] if "maxItems" in node else []
    if node.get("items") is False:
        bounds.append(len(node.get("prefixItems", [])))
    return min(bounds, default=None)


def _count(node: Schema, key: str, otherwise: int) -> int:
    value = node.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise UndecidedError(f"{key} that is not an integer")
    return int(value)
