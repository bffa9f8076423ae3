"""Negates schemas without using `not`.

A schema is violated if one of its keywords is: each keyword yields alternatives, one of which a
violating value satisfies. Keywords that relate several parts of a value (a name other than these,
an item like another one) have no alternatives.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from sylvan.runtime.features.grammar.rewrite.complement import not_beginning_with, other_than
from sylvan.runtime.features.grammar.rewrite.context import (
    Budget,
    RewriteContext,
    UndecidedError,
    all_of,
    any_of,
)
from sylvan.runtime.features.grammar.rewrite.kinds import (
    ALL,
    NUMBERS,
    Kinds,
    kind_of,
    kinds_of_types,
    types_of_kinds,
)
from sylvan.runtime.features.grammar.schema import Schema, are_disjoint

_MAX_DEPTH = 16
_OBJECT: Kinds = frozenset({"object"})
_ARRAY: Kinds = frozenset({"array"})
_STRING: Kinds = frozenset({"string"})
_LITERAL = re.compile(r"\^((?:[A-Za-z0-9 _:@,=%~/<>!&;\"'#-]|\\[.\-/()\[\]{}|*+?^$])*)(\$?)")
_ESCAPE = re.compile(r"\\(.)")


class Negation:
    """Negates schemas of one document.

    Args:
        root: The document.
        budget: Budget of the document.
    """

    def __init__(self, root: Schema, budget: Budget) -> None:
        self._context = RewriteContext(root, budget, self.deny)
        self._depth = 0

    def deny(self, schema: Any, within: Kinds = ALL) -> Any:
        """Return a schema for values of the kinds `within` that are invalid by `schema`.

        Raises:
            UndecidedError: There is none; the message names the keyword.
            RequestError: It would be too large.
        """
        return any_of(self._alternatives(schema, within))

    def _alternatives(self, schema: Any, within: Kinds) -> list[Any]:
        self._context.budget.spend()
        if schema is False:
            return [True]
        if schema is True or not within:
            return []
        if not isinstance(schema, dict):
            raise UndecidedError("what is not a schema")
        if self._depth == _MAX_DEPTH:
            raise UndecidedError("a schema that refers to itself")
        self._depth += 1
        try:
            found: list[Any] = []
            for keyword in schema:
                rule = _RULES.get(keyword)
                if rule is not None:
                    found += rule(schema, within, self._context)
                elif keyword in _UNDECIDED and schema[keyword] is not _EMPTY.get(keyword):
                    raise UndecidedError(f"not {keyword}")
        finally:
            self._depth -= 1
        return found


_Rule = Callable[[Schema, Kinds, RewriteContext], list[Any]]


def _not_type(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    rest = within - kinds_of_types(schema["type"])
    return _of_kinds(rest) if rest else []


def _of_kinds(kinds: Kinds) -> list[Any]:
    types = types_of_kinds(kinds)
    if types is None:
        raise UndecidedError("numbers that are not integers")
    return [{"type": types}]


def _not_const(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    return _other_values([schema["const"]], within, context)


def _not_enum(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    values = schema["enum"]
    if not isinstance(values, list):
        raise UndecidedError("enum that is not a list")
    return _other_values(values, within, context)


def _other_values(values: list[Any], within: Kinds, context: RewriteContext) -> list[Any]:
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        kind = kind_of(value)
        by_kind.setdefault("number" if kind in NUMBERS else kind, []).append(value)
    rest = within - by_kind.keys() - (NUMBERS if "number" in by_kind else set())
    found = _of_kinds(rest) if rest else []
    context.budget.spend(len(values))
    if "boolean" in by_kind and "boolean" in within:
        found += [{"const": b} for b in (True, False) if b not in by_kind["boolean"]]
    if "number" in by_kind and within & NUMBERS:
        found += _between(sorted(set(by_kind["number"])), _number(within))
    if "string" in by_kind and "string" in within:
        found.append({"type": "string", "pattern": other_than(by_kind["string"])})
    if "array" in by_kind and "array" in within:
        found.append(all_of([any_of(_other_arrays(v, context)) for v in by_kind["array"]]))
    if "object" in by_kind and "object" in within:
        if by_kind["object"] != [{}]:
            raise UndecidedError("other objects than a given one")
        found.append({"type": "object", "minProperties": 1})
    return found


def _number(within: Kinds) -> str:
    return "number" if "fraction" in within else "integer"


def _between(numbers: list[Any], name: str) -> list[Any]:
    found: list[Any] = [{"type": name, "exclusiveMaximum": numbers[0]}]
    for low, high in itertools.pairwise(numbers):
        if name == "number" or high - low > 1:
            found.append({"type": name, "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*found, {"type": name, "exclusiveMinimum": numbers[-1]}]


def _other_arrays(value: list[Any], context: RewriteContext) -> list[Any]:
    found: list[Any] = [{"type": "array", "minItems": len(value) + 1}]
    if value:
        found.append({"type": "array", "maxItems": len(value) - 1})
    return found + [_item(i, context.deny({"const": item})) for i, item in enumerate(value)]


def _item(index: int, schema: Any) -> Any:
    prefix = [*[True] * index, schema]
    return {"type": "array", "minItems": index + 1, "prefixItems": prefix}


def _bound(keyword: str, opposite: str, step: int, kind: str) -> _Rule:
    """Negate a bound on a count: "at least n" becomes "at most n - 1", and so on."""

    def rule(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
        value = schema[keyword]
        if kind not in within:
            return []
        if not isinstance(value, int | float) or not float(value).is_integer():
            raise UndecidedError(f"{keyword} that is not an integer")
        count = int(value) + step
        return [{"type": kind, opposite: count}] if count >= 0 else []

    return rule


def _limit(keyword: str, opposite: str) -> _Rule:
    """Negate a bound on a number."""

    def rule(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
        if not within & NUMBERS:
            return []
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UndecidedError(f"{keyword} that is not a number")
        return [{"type": _number(within), opposite: value}]

    return rule


def _not_pattern(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "string" not in within:
        return []
    found = _LITERAL.fullmatch(str(schema["pattern"]))
    if found is None:
        raise UndecidedError("not pattern, but for ^text and ^text$")
    text = _ESCAPE.sub(r"\1", found[1])
    regex = other_than([text]) if found[2] else not_beginning_with([text])
    return [{"type": "string", "pattern": regex}]


def _not_required(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "object" not in within:
        return []
    return [_without(name) for name in _names(schema["required"])]


def _without(name: str) -> Any:
    return {"type": "object", "properties": {name: False}}


def _with(name: str, schema: Any = True) -> Any:
    found = {"type": "object", "properties": {name: schema}, "required": [name]}
    return found if schema is not False else False


def _not_properties(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "object" not in within:
        return []
    parts = _map(schema["properties"]).items()
    return [_with(name, context.deny(part)) for name, part in parts]


def _not_additional(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    rest = schema["additionalProperties"]
    if "object" not in within or rest is True or rest == {}:
        return []
    if rest is False and not schema.get("properties") and not schema.get("patternProperties"):
        return [{"type": "object", "minProperties": 1}]
    raise UndecidedError("not additionalProperties")


def _not_patterns(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    parts = _map(schema["patternProperties"]).values()
    if "object" not in within or all(part is True or part == {} for part in parts):
        return []
    raise UndecidedError("not patternProperties")


def _not_dependent_required(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "object" not in within:
        return []
    return [
        all_of([_with(name), _without(other)])
        for name, others in _map(schema["dependentRequired"]).items()
        for other in _names(others)
    ]


def _not_dependent_schemas(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "object" not in within:
        return []
    parts = _map(schema["dependentSchemas"]).items()
    return [all_of([_with(name), context.deny(part, _OBJECT)]) for name, part in parts]


def _not_prefix(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "array" not in within:
        return []
    denied = [context.deny(part) for part in _list(schema["prefixItems"])]
    return [_item(i, part) for i, part in enumerate(denied) if part is not False]


def _not_items(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    rest, prefix = schema["items"], _list(schema.get("prefixItems", []))
    if "array" not in within or rest is True or rest == {}:
        return []
    if rest is False:
        return [{"type": "array", "minItems": len(prefix) + 1}]
    raise UndecidedError("not items")


def _not_contains(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    if "array" not in within or schema.get("minContains") == 0 == len(_most(schema)):
        return []
    if schema.get("minContains", 1) != 1 or _most(schema):
        raise UndecidedError("not contains, with minContains or maxContains")
    return [{"type": "array", "items": context.deny(schema["contains"])}]


def _most(schema: Schema) -> list[Any]:
    return [schema["maxContains"]] if "maxContains" in schema else []


def _not_all(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    return [context.deny(part, within) for part in _list(schema["allOf"])]


def _not_any(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    return [all_of([context.deny(part, within) for part in _list(schema["anyOf"])])]


def _not_one(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    parts = _list(schema["oneOf"])
    context.budget.spend(len(parts) ** 2)
    pairs = itertools.combinations(parts, 2)
    both = [all_of([a, b]) for a, b in pairs if not are_disjoint((a, b), context.root)]
    return [all_of([context.deny(part, within) for part in parts]), *both]


def _not_if(schema: Schema, within: Kinds, context: RewriteContext) -> list[Any]:
    test, found = schema["if"], []
    if "then" in schema:
        found.append(all_of([test, context.deny(schema["then"], within)]))
    if "else" in schema:
        denied = context.deny(schema["else"], within)
        found.append(all_of([context.deny(test, within), denied]))
    return found


_RULES: Mapping[str, _Rule] = {
    "$ref": lambda s, w, c: [c.deny(c.follow(s["$ref"]), w)],
    "additionalProperties": _not_additional,
    "allOf": _not_all,
    "anyOf": _not_any,
    "const": _not_const,
    "contains": _not_contains,
    "dependentRequired": _not_dependent_required,
    "dependentSchemas": _not_dependent_schemas,
    "enum": _not_enum,
    "exclusiveMaximum": _limit("exclusiveMaximum", "minimum"),
    "exclusiveMinimum": _limit("exclusiveMinimum", "maximum"),
    "if": _not_if,
    "items": _not_items,
    "maxItems": _bound("maxItems", "minItems", 1, "array"),
    "maxLength": _bound("maxLength", "minLength", 1, "string"),
    "maxProperties": _bound("maxProperties", "minProperties", 1, "object"),
    "maximum": _limit("maximum", "exclusiveMinimum"),
    "minItems": _bound("minItems", "maxItems", -1, "array"),
    "minLength": _bound("minLength", "maxLength", -1, "string"),
    "minProperties": _bound("minProperties", "maxProperties", -1, "object"),
    "minimum": _limit("minimum", "exclusiveMaximum"),
    "not": lambda s, w, c: [s["not"]],
    "oneOf": _not_one,
    "pattern": _not_pattern,
    "patternProperties": _not_patterns,
    "prefixItems": _not_prefix,
    "properties": _not_properties,
    "required": _not_required,
    "type": _not_type,
}
_UNDECIDED = frozenset(
    [
        "$dynamicRef",
        "$recursiveRef",
        "format",
        "multipleOf",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ]
)
_EMPTY = {
    "propertyNames": True,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}
"""Values with which these keywords cannot be violated."""


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UndecidedError("names that are not a list of strings")
    return value


def _map(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UndecidedError("what is not an object")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UndecidedError("what is not a list")
    return value
