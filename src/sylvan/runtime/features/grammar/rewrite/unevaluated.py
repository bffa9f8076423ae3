"""Rules for `unevaluatedProperties` and `unevaluatedItems`: what the other keywords evaluate.

What is evaluated depends on which schemas hold. Evaluating more only constrains less, so a value is
valid if it is valid for some subset of the schemas that hold: one alternative per subset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from sylvan.runtime.features.grammar.rewrite.context import (
    RewriteContext,
    UndecidedError,
    all_of,
    any_of,
)
from sylvan.runtime.features.grammar.rewrite.kinds import ALL, Kinds
from sylvan.runtime.features.grammar.schema import Schema

MAX_CHOICES = 256
"""Most schemas that hold."""
_MAX_REFS = 8


@dataclass(frozen=True, slots=True)
class _Seen:
    """Properties and items that valid subschemas evaluate.

    Attributes:
        holding: These schemas.
        names: Names of properties.
        patterns: Patterns of property names.
        count: Number of items, from the first.
        everything: All properties, or all items.
    """

    holding: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    count: int = 0
    everything: bool = False

    def and_(self, other: _Seen) -> _Seen:
        """Return what both evaluate."""
        return _Seen(
            (*self.holding, *other.holding),
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            max(self.count, other.count),
            self.everything or other.everything,
        )

    def holds(self, *schemas: Any) -> _Seen:
        """Return the same, with these schemas also holding."""
        added = (*self.holding, *schemas)
        return _Seen(added, self.names, self.patterns, self.count, self.everything)


_Own = Callable[[Schema], _Seen]


def without_unevaluated_properties(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`unevaluatedProperties`: replace by `additionalProperties` beside all evaluated names."""
    rest = node["unevaluatedProperties"]
    beside = {k: v for k, v in node.items() if k != "unevaluatedProperties"}
    found: list[Any] = []
    for seen in _choices(beside, _own_properties, context, 0):
        closed: dict[str, Any] = {
            "properties": dict.fromkeys(seen.names, True),
            "patternProperties": dict.fromkeys(seen.patterns, True),
            "additionalProperties": rest,
        }
        closed = {key: value for key, value in closed.items() if value != {}}
        found.append(all_of([*seen.holding, True if seen.everything else closed]))
    return any_of(found)


def without_unevaluated_items(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`unevaluatedItems`: replace by `items` after the evaluated ones."""
    rest = node["unevaluatedItems"]
    beside = {k: v for k, v in node.items() if k != "unevaluatedItems"}
    found: list[Any] = []
    for seen in _choices(beside, _own_items, context, 0):
        first = {"prefixItems": [True] * seen.count} if seen.count else {}
        closed = {**first, "items": rest}
        found.append(all_of([*seen.holding, True if seen.everything else closed]))
    return any_of(found)


def _own_properties(node: Schema) -> _Seen:
    everything = "additionalProperties" in node or "unevaluatedProperties" in node
    names, patterns = node.get("properties", {}), node.get("patternProperties", {})
    return _Seen(names=tuple(names), patterns=tuple(patterns), everything=everything)


def _own_items(node: Schema) -> _Seen:
    if "contains" in node:
        raise UndecidedError("unevaluatedItems beside contains")
    everything = "items" in node or "unevaluatedItems" in node
    return _Seen(count=len(node.get("prefixItems", [])), everything=everything)


def _choices(node: Any, own: _Own, context: RewriteContext, refs: int) -> list[_Seen]:
    """Return what a schema that holds may evaluate, by which of its parts hold."""
    if not isinstance(node, dict):
        return [_Seen()]
    if refs > _MAX_REFS:
        raise UndecidedError("unevaluated... beside a schema that refers to itself")
    factors: list[list[_Seen]] = [[own(node)]]
    if "$ref" in node:
        factors.append(_choices(context.follow(node["$ref"]), own, context, refs + 1))
    factors += [_choices(part, own, context, refs) for part in node.get("allOf", [])]
    for part in node.get("anyOf", []):
        factors.append([_Seen(), *_holding(part, own, context, refs)])
    ones = [seen for part in node.get("oneOf", []) for seen in _holding(part, own, context, refs)]
    factors.append([_Seen(), *ones])
    for name, part in node.get("dependentSchemas", {}).items():
        there = {"type": "object", "required": [name]}
        found = _holding(part, own, context, refs)
        factors.append([_Seen(), *(seen.holds(there) for seen in found)])
    if "if" in node:
        factors.append(_branches(node, own, context, refs))
    return _products(factors, context)


def _holding(part: Any, own: _Own, context: RewriteContext, refs: int) -> list[_Seen]:
    """Return the choices of an optional part; empty if it evaluates nothing."""
    found = _choices(part, own, context, refs)
    nothing = _Seen()
    return [s.holds(part) for s in found if _Seen((), *_evaluated(s)) != nothing]


def _evaluated(seen: _Seen) -> tuple[tuple[str, ...], tuple[str, ...], int, bool]:
    return seen.names, seen.patterns, seen.count, seen.everything


def _branches(node: Schema, own: _Own, context: RewriteContext, refs: int) -> list[_Seen]:
    """Return the branches: `then` holds if `if` does, `else` if it does not."""
    test = node["if"]
    yes = _products(
        [
            _choices(test, own, context, refs),
            _choices(node.get("then", True), own, context, refs),
        ],
        context,
    )
    found = [_Seen(), *(seen.holds(test, node.get("then", True)) for seen in yes)]
    no = _holding(node.get("else", True), own, context, refs)
    if no:
        denied = context.deny(test, ALL)
        found += [seen.holds(denied) for seen in no]
    return found


def _products(factors: list[list[_Seen]], context: RewriteContext) -> list[_Seen]:
    found = [_Seen()]
    for factor in factors:
        if len(found) * len(factor) > MAX_CHOICES:
            raise UndecidedError(f"unevaluated... beside more than {MAX_CHOICES} choices")
        context.budget.spend(len(found) * len(factor))
        joined = [one.and_(other) for one, other in product(found, factor)]
        found = list({repr(seen): seen for seen in joined}.values())
    return found
