"""Relaxes schemas until a grammar library supports them: each value of the original stays valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.guard.conditions import EVERYTHING, check_schema
from sylvan.runtime.features.grammar.guard.regions import regions
from sylvan.runtime.features.grammar.rewrite import weakened
from sylvan.runtime.features.grammar.rewrite.context import Budget
from sylvan.runtime.features.grammar.rewrite.normal import normalised
from sylvan.runtime.features.grammar.schema import (
    DEFINITIONS,
    Schema,
    object_schema,
    with_children,
)
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.runtime.features.grammar.structural import leaves, tree_of, with_leaves

Compile = Callable[[GrammarSpec], CompiledGrammar]
Unenforced = dict[str, set[str]]
"""Keywords that a grammar does not enforce everywhere (`conditions.Conditions`), by the place of
their schema in structural tags; `WHOLE`: the grammar has a single schema."""
WHOLE = "#"

MAX_ROUNDS = 24
"""Places of one schema that may be dropped one by one, before larger parts are dropped at once."""
_NOTHING = re.compile("matches no text at all|Unsatisfiable schema")
_PLACE = re.compile(r"json_schema: (#[^\n]*?)(?:: | is not supported| (?:of|beside|that|and) |$)")
_AROUND = re.compile(r"\(\?<?[=!](?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)")
"""A look-around in a regex, containing at most one group."""
_GROUPS = frozenset({"prefixItems", "properties", "patternProperties", "allOf", "anyOf", "oneOf"})
_MAPS = frozenset({"properties", "patternProperties", *DEFINITIONS})
_STRUCTURE = frozenset(
    [
        *("$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "items", "maxItems"),
        *("minItems", "prefixItems", "properties", "required", "type", *DEFINITIONS),
    ]
)


def compile_guarded(spec: GrammarSpec, compile_one: Compile) -> tuple[CompiledGrammar, Unenforced]:
    """Compile a grammar; if a schema is not supported, compile the strictest supported relaxation.

    Raises:
        RequestError: It is invalid or unsatisfiable, or `spec.exact` and not fully supported.
    """
    try:
        return compile_one(spec), {}
    except RequestError as error:
        if spec.exact or _NOTHING.search(str(error)):
            raise
        if spec.kind == "json_schema":
            compiled, _, lost = _relaxed(spec, compile_one, error)
            return compiled, {WHOLE: lost}
        if spec.kind != "structural_tag":
            raise
        return _relaxed_tags(spec, compile_one, error)


def _relaxed_tags(
    spec: GrammarSpec, compile_one: Compile, refused: RequestError
) -> tuple[CompiledGrammar, Unenforced]:
    """Relax the unsupported schemas in structural tags whose place in an output can be found."""
    tree = tree_of(spec)
    watched = {region.place for region in regions(spec)}
    lost: Unenforced = {}

    def weaker(node: Mapping[str, Any], at: str) -> Mapping[str, Any]:
        place, leaf = next(leaves(node, at))
        try:
            compile_one(leaf)
        except RequestError as error:
            if node["type"] != "json_schema" or place not in watched or _NOTHING.search(str(error)):
                raise refused from None
            _, written, lost[place] = _relaxed(leaf, compile_one, refused)
            return {**node, "json_schema": written}
        return node

    written = {"type": "structural_tag", "format": with_leaves(tree, weaker)}
    if not lost:  # the error is not about a schema
        raise refused
    try:
        return compile_one(GrammarSpec("structural_tag", json.dumps(written))), lost
    except RequestError:
        raise refused from None


def _relaxed(
    spec: GrammarSpec, compile_one: Compile, refused: RequestError
) -> tuple[CompiledGrammar, Schema, set[str]]:
    """Return the grammar of a relaxed schema, that schema, and the dropped keywords."""
    schema = object_schema(spec)
    weaker = _relaxations(schema)
    try:
        check_schema(schema)
    except RequestError:  # invalid: it has no meaning
        raise refused from None
    for written, lost in weaker:
        try:
            return _compile_most(written, lost, compile_one)
        except RequestError as error:
            if _NOTHING.search(str(error)):
                raise
    raise refused


def _relaxations(schema: Schema) -> Sequence[tuple[Schema, set[str]]]:
    """Yield ever weaker schemas, with the dropped keywords.

    Raises:
        RequestError: A reference is external, or no value is valid.
    """
    lost = set[str]()
    try:
        written = weakened(schema, lost)
        found = [(written, lost), (_structure(written), {EVERYTHING})]
    except NotSupportedError:
        found = _unwritten(schema)
    return [*found, (_outermost(schema), {EVERYTHING})]


def _unwritten(schema: Schema) -> list[tuple[Schema, set[str]]]:
    """Relax a schema whose rewriting would exceed the size limit."""
    try:
        return [(_structure(normalised(schema, Budget())), {EVERYTHING})]
    except NotSupportedError:  # a dynamic reference depends on how a value is reached
        return []


def _compile_most(
    schema: Schema, lost: set[str], compile_one: Compile
) -> tuple[CompiledGrammar, Schema, set[str]]:
    """Drop what the library rejects, place by place."""
    for _ in range(MAX_ROUNDS):
        spec = GrammarSpec("json_schema", json.dumps(schema))
        try:
            return compile_one(spec), schema, lost
        except RequestError as error:
            found = _PLACE.search(str(error))
            if found is None or _NOTHING.search(str(error)):
                raise
            weaker = json.loads(spec.text)
            given_up = _give_up(weaker, found[1])
            if given_up is None:
                raise
            schema, lost = weaker, lost | given_up
    raise RequestError("json_schema cannot be enforced by a grammar", param="json_schema")


def _give_up(schema: dict[str, Any], place: str) -> set[str] | None:
    """Drop what is at a JSON pointer; return the lost keywords. None: nothing is there.

    Keywords of the same schema that depend on it are dropped too, so the schema gets weaker.
    """
    steps = [unquote(part).replace("~1", "/").replace("~0", "~") for part in place.split("/")[1:]]
    path = _path(schema, steps)
    if path is None or not steps:
        return None
    holder, last = path[-2], steps[-1]
    if isinstance(holder, list):
        holder[int(last)] = True
        return {EVERYTHING}
    if len(steps) > 1 and steps[-2] in _MAPS and not _is_name(steps[:-2]):
        return None if path[-1] is True else _without_member(path[-3], steps[-2], last)
    return _without_keyword(holder, last)


def _path(schema: Any, steps: Sequence[str]) -> list[Any] | None:
    """Return the nodes along a path, starting with the schema; None if a step is missing."""
    found = [schema]
    for step in steps:
        at = found[-1]
        if isinstance(at, list) and step.isdecimal() and int(step) < len(at):
            found.append(at[int(step)])
        elif isinstance(at, dict) and step in at:
            found.append(at[step])
        else:
            return None
    return found


def _without_member(node: dict[str, Any], keyword: str, name: str) -> set[str]:
    """Drop a schema from one of a schema's maps."""
    if keyword == "patternProperties":
        del node[keyword][name]
        node.pop("additionalProperties", None)
    else:
        node[keyword][name] = True
    return {EVERYTHING}


def _without_keyword(node: dict[str, Any], keyword: str) -> set[str]:
    """Drop a keyword; in a regex, drop look-around first."""
    if keyword == "pattern" and isinstance(node[keyword], str):
        plain = _AROUND.sub("", node[keyword])
        if plain != node[keyword]:
            node[keyword] = plain
            return {keyword}
    del node[keyword]
    if keyword in ("properties", "patternProperties"):
        node.pop("additionalProperties", None)
    if keyword == "prefixItems":
        node.pop("items", None)
    return {EVERYTHING} if keyword in _GROUPS or keyword in ("$ref", *DEFINITIONS) else {keyword}


def _is_name(steps: list[str]) -> bool:
    """Whether a keyword's name at this path is the name of a property."""
    return bool(steps) and steps[-1] in _MAPS and not _is_name(steps[:-1])


def _structure(schema: Any) -> Any:
    """Keep types, names, items and constants; drop constraints on strings and numbers."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key in _STRUCTURE}
    if "anyOf" not in kept and "oneOf" in schema:
        kept["anyOf"] = schema["oneOf"]
    if "patternProperties" in schema:
        kept.pop("additionalProperties", None)
    return with_children(kept, lambda part, _: _structure(part))


def _outermost(schema: Schema) -> Schema:
    """Keep at least the type of the whole value."""
    return {"type": schema["type"]} if "type" in schema else {}
