"""Rules for keywords that choose between schemas: each returns a replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sylvan.runtime.features.grammar.rewrite.context import (
    RewriteContext,
    UndecidedError,
    all_of,
    any_of,
)
from sylvan.runtime.features.grammar.rewrite.kinds import ALL, Kinds, kinds_of, types_of_kinds
from sylvan.runtime.features.grammar.schema import Schema, are_disjoint

Rule = Callable[[Schema, Kinds, RewriteContext], Any]
"""Returns a schema equivalent to some keywords of a schema, for values of some kinds.

None: the library supports them. Raises UndecidedError if there is no such schema, RequestError
if it would be too large.
"""


def without_not(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`not`: the alternatives that violate its schema."""
    return context.deny(node["not"], within)


def without_if(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`if`, `then`, `else`: one of two alternatives."""
    test, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
    if then is True and otherwise is True:
        return True
    yes = test if then is True else all_of([test, then])
    denied = context.deny(test, within & kinds_of(otherwise, context.root))
    return any_of([yes, all_of([denied, otherwise])])


def without_one_of(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`oneOf`: an `anyOf` of its schemas, each excluding those it may overlap with."""
    parts = node["oneOf"]
    if not isinstance(parts, list):
        raise UndecidedError("oneOf that is not a list")
    beside = {key: value for key, value in node.items() if key in ("type", "const", "enum")}
    written: list[Any] = []
    for i, part in enumerate(parts):
        context.budget.spend(len(parts))
        others = parts[:i] + parts[i + 1 :]
        shared = [o for o in others if not are_disjoint((_both(part, beside), o), context.root)]
        kinds = within & kinds_of(part, context.root)
        denied = [
            _unless_disjoint(context.deny(other, kinds), part, context) if kinds else False
            for other in shared
        ]
        written.append(all_of([part, *denied]))
    return any_of(written)


def _both(part: Any, beside: Schema) -> Any:
    return {"allOf": [part, beside]} if beside else part


def _unless_disjoint(schema: Any, part: Any, context: RewriteContext) -> Any:
    """Return the alternatives, without those that exclude `part` anyway."""
    if not isinstance(schema, dict) or schema.keys() != {"anyOf"}:
        return schema
    kept = [s for s in schema["anyOf"] if not are_disjoint((s, part), context.root)]
    return any_of(kept)


def without_dependent_required(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`dependentRequired`: each name is absent, or the others are present."""
    found = node["dependentRequired"]
    if not isinstance(found, dict):
        raise UndecidedError("dependentRequired that is not an object")
    return all_of([_depending(n, {"required": names}) for n, names in found.items() if names])


def without_dependent_schemas(node: Schema, within: Kinds, context: RewriteContext) -> Any:
    """`dependentSchemas`: each name is absent, or the schema holds."""
    found = node["dependentSchemas"]
    if not isinstance(found, dict):
        raise UndecidedError("dependentSchemas that is not an object")
    parts = [(n, part) for n, part in found.items() if part is not True and part != {}]
    return all_of([_depending(n, part) for n, part in parts])


def _depending(name: str, then: Any) -> Any:
    """Require `then` of objects with that name."""
    absent = {"type": "object", "properties": {name: False}}
    there = {"type": "object", "properties": {name: True}, "required": [name]}
    return any_of([_no_object(), absent, all_of([there, then])])


def _no_object() -> Any:
    return {"type": types_of_kinds(ALL - {"object"})}
