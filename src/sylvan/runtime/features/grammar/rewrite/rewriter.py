"""Applies the rules to every schema of a document."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.rewrite import arrays, formats, objects, rules, unevaluated
from sylvan.runtime.features.grammar.rewrite.context import Budget, RewriteContext, UndecidedError
from sylvan.runtime.features.grammar.rewrite.kinds import ALL, kinds_of
from sylvan.runtime.features.grammar.rewrite.negation import Negation
from sylvan.runtime.features.grammar.rewrite.normal import normalised
from sylvan.runtime.features.grammar.schema import (
    DEFINITIONS,
    Schema,
    canonical,
    check_endless,
    children,
    counts_on_names,
    pointer,
    resolve,
    with_children,
)
from sylvan.runtime.features.grammar.spec import NotSupportedError

_RULES: tuple[tuple[str, tuple[str, ...], rules.Rule], ...] = (
    ("unevaluatedProperties", (), unevaluated.without_unevaluated_properties),
    ("unevaluatedItems", (), unevaluated.without_unevaluated_items),
    ("uniqueItems", (), arrays.without_unique_items),
    ("contains", ("minContains", "maxContains"), arrays.without_contains),
    ("propertyNames", (), objects.without_property_names),
    ("minProperties", (), objects.without_min_properties),
    ("maxProperties", (), objects.without_max_properties),
    ("dependentRequired", (), rules.without_dependent_required),
    ("dependentSchemas", (), rules.without_dependent_schemas),
    ("not", (), rules.without_not),
    ("if", ("then", "else"), rules.without_if),
    ("oneOf", (), rules.without_one_of),
)
"""A keyword, its dependent keywords, and the rule that replaces them."""

_RULED = frozenset(keyword for keyword, _, _ in _RULES)

_ANNOTATIONS = frozenset(
    [
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
        *DEFINITIONS,
    ]
)
_TOGETHER = (
    frozenset({"additionalProperties", "patternProperties", "properties"}),
    frozenset({"items", "prefixItems"}),
    frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"}),
)
"""Keywords that must not come from both of two schemas that are merged."""
_OWN_DIALECTS = re.compile(r"$|https?://json-schema\.org/(?:draft|schema)")
_DEEP = "json_schema is nested too deep"


@dataclass(frozen=True, slots=True)
class SupportedKeywords:
    """Keywords that a grammar library supports, which are not rewritten.

    Attributes:
        formats: String formats.
        keywords: Keywords for which there are rules.
    """

    formats: Set[str]
    keywords: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema for a library.

    Attributes:
        schema: The schema.
        annotations: Unknown formats, which have no effect; sorted.
    """

    schema: Schema
    annotations: tuple[str, ...]


def rewrite(root: Schema, holds: SupportedKeywords) -> Rewritten:
    """Return an equivalent schema with supported keywords only, as far as there is one.

    A schema that needs no rewriting is returned unchanged.

    Raises:
        NotSupportedError: A keyword has no equivalent; the message names it and its place.
        RequestError: A reference is external; no value is valid; or the schema would be too
            large; the message names the place or the limit.
    """
    try:
        rewriter = _Rewriter(root, holds)
        return rewriter.run()
    except RecursionError:
        raise RequestError(_DEEP, param="json_schema") from None


def weakened(root: Schema, lost: set[str]) -> Schema:
    """Return a weaker schema with supported keywords only: every value of `root` is valid by it.

    Formats stay unchanged. Keywords without an equivalent are dropped; they, and the keywords they
    were derived from, are added to `lost`.

    Raises:
        RequestError: as for `rewrite`.
    """
    try:
        return _Rewriter(root, SupportedKeywords(formats.KNOWN), lost).run().schema
    except RecursionError:
        raise RequestError(_DEEP, param="json_schema") from None


class _Rewriter:
    """See `rewrite`; with `lost`, see `weakened`."""

    def __init__(
        self, root: Schema, holds: SupportedKeywords, lost: set[str] | None = None
    ) -> None:
        self._lost, self._derived = lost, 0
        self._original, self._holds, budget = root, holds, Budget()
        self._root = normalised(root, budget)
        self._context = RewriteContext(self._root, budget, Negation(self._root, budget).deny)
        self._annotations: set[str] = set()
        self._written: dict[int, tuple[Any, Any]] = {}  # by ID; keeps the schema alive
        self._joined: dict[str, str] = {}  # references with siblings
        self._added: dict[str, Any] = {}
        self._cyclic: dict[str, bool] = {}

    def run(self) -> Rewritten:
        definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        body = self._schema(_without(self._root, DEFINITIONS), "#")
        written = {
            key: {name: self._schema(s, pointer("#", key, name)) for name, s in found.items()}
            for key, found in definitions.items()
        }
        if body is False:
            raise RequestError("json_schema: # matches no text at all", param="json_schema")
        if self._is_unchanged(body, written):
            return Rewritten(self._original, ())
        if self._added:
            first = DEFINITIONS[0]
            written[first] = {**written.get(first, {}), **self._added}
        found = {**(body if isinstance(body, dict) else {}), **written}
        check_endless(found)
        return Rewritten(found, tuple(sorted(self._annotations)))

    def _is_unchanged(self, body: Any, definitions: Schema) -> bool:
        said = _OWN_DIALECTS.match(str(self._original.get("$schema", "")))
        kept = _without(self._original, (*DEFINITIONS, "$schema") if said else DEFINITIONS)
        return json.dumps(body) == json.dumps(kept) and all(
            json.dumps(resolve(self._original, pointer("#", key, name))) == json.dumps(schema)
            for key, part in definitions.items()
            for name, schema in part.items()
        )

    def _schema(self, node: Any, at: str) -> Any:
        if not isinstance(node, dict):
            return node
        known = self._written.get(id(node))
        if known is None:
            self._context.budget.spend()
            known = self._written[id(node)] = (node, self._rewritten(node, at))
        return known[1]

    def _rewritten(self, node: Schema, at: str) -> Any:
        rest, parts, given = dict(node), list[Any](), list[Any]()
        for keyword, beside, rule in _RULES:
            if keyword not in self._holds.keywords:
                part = self._apply(keyword, rule, node, at)
                if keyword in node and part is not None:
                    parts.append(part)
                    del rest[keyword]
                for name in beside if keyword not in rest else ():
                    rest.pop(name, None)
        self._format(rest, given)
        if self._lost is not None and counts_on_names(rest):
            self._drop_keyword("minProperties")
            del rest["minProperties"]
        rest = with_children(rest, lambda part, steps: self._schema(part, pointer(at, *steps)))
        self._derived += 1
        written = [self._schema(part, at) for part in (*parts, *given)]
        self._derived -= 1
        return self._circular(node, _joined(rest, written), at)

    def _apply(self, keyword: str, rule: rules.Rule, node: Schema, at: str) -> Any:
        """Apply a rule; None if the library may do better, or there is nothing to do."""
        if keyword not in node:
            return None
        try:
            return rule(node, kinds_of(node, self._root), self._context)
        except UndecidedError as error:
            if self._lost is not None:
                self._drop_keyword(keyword)
                return self._weakened(keyword, node)
            if keyword == "oneOf":
                return None
            message = f"json_schema: {pointer(at, keyword)}: {error} is not supported by grammars"
            raise NotSupportedError(message, param="json_schema") from None

    def _weakened(self, keyword: str, node: Schema) -> Any:
        """Return a weaker replacement of a keyword without an equivalent."""
        if keyword == "oneOf":
            return {"anyOf": node["oneOf"]}
        names = node.get("propertyNames")
        if keyword == "propertyNames" and isinstance(names, dict):
            for key in ("enum", "pattern", "format", "$ref"):
                if key in names:
                    with contextlib.suppress(UndecidedError):
                        only = {"propertyNames": {key: names[key]}}
                        return objects.without_property_names(only, ALL, self._context)
        return True

    def _drop_keyword(self, keyword: str) -> None:
        """Drop a keyword; in a schema made by rules, mark everything it was derived from."""
        assert self._lost is not None
        self._lost |= {keyword, *(_RULED if self._derived else ())}

    def _format(self, node: dict[str, Any], parts: list[Any]) -> None:
        name = node.get("format")
        if not isinstance(name, str) or name in self._holds.formats:
            return
        if name in formats.PATTERNS:
            del node["format"]
            parts.append({"pattern": formats.PATTERNS[name]})
        elif name not in formats.KNOWN:
            del node["format"]
            self._annotations.add(name)

    # ---- circular references

    def _circular(self, node: Schema, written: Any, at: str) -> Any:
        """Move a reference to itself with siblings into a definition of its own.

        Libraries expand the two in place, which does not terminate.
        """
        reference = node.get("$ref")
        if not isinstance(written, dict) or not isinstance(reference, str):
            return written
        beside = {k: v for k, v in written.items() if k != "$ref" and k not in _ANNOTATIONS}
        if not beside or not self._is_cyclic(reference):
            return written
        key = json.dumps([reference, canonical(beside)])
        if key not in self._joined:
            name = f"beside{len(self._joined) + 1}"
            self._joined[key] = pointer("#", DEFINITIONS[0], name)
            target = dict(_without(self._context.follow(reference), DEFINITIONS))
            self._added[name] = {"allOf": [self._rewritten(target, at), beside]}
        return {"$ref": self._joined[key]}

    def _is_cyclic(self, reference: str) -> bool:
        found = self._cyclic.get(reference)
        if found is None:
            found = self._cyclic[reference] = reference in _reachable(self._root, reference)
        return found


def _reachable(root: Schema, reference: str) -> set[str]:
    """Return the references that are reachable from a schema."""
    found: set[str] = set()
    stack = [resolve(root, reference)]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        target = node.get("$ref")
        if isinstance(target, str) and target not in found:
            found.add(target)
            stack.append(resolve(root, target))
        stack += [part for steps, part in children(node) if steps[0] not in DEFINITIONS]
    return found


def _joined(node: dict[str, Any], parts: list[Any]) -> Any:
    """Merge a schema with another that must also hold."""
    if any(part is False for part in parts):
        return False
    kept: list[Any] = []
    for part in parts:
        if part is True or part == {}:
            continue
        if _constrain_disjoint(node, part):
            node = {**node, **part}
        else:
            kept.append(part)
    if kept:
        node = {**node, "allOf": [*node.get("allOf", []), *kept]}
    return node


def _constrain_disjoint(node: Schema, part: Schema) -> bool:
    """Whether two schemas constrain disjoint keywords, so that they can be merged."""
    mine, others = node.keys() - _ANNOTATIONS, part.keys() - _ANNOTATIONS
    return (
        not mine & others
        and not any(mine & group and others & group for group in _TOGETHER)
        and not part.keys() & _ANNOTATIONS
    )


def _without(node: Schema, keys: tuple[str, ...]) -> Schema:
    return {key: value for key, value in node.items() if key not in keys}
