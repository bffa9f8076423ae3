"""Normalises all drafts to one notation, and resolves references.

`dependencies` is split, a list of `items` becomes `prefixItems`, boolean bounds of draft 4 become
numbers, and siblings of `$ref` in drafts up to 7 are removed. References become `#` or
`#/$defs/name`, including those by URL or anchor; only referenced definitions are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urljoin

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.rewrite.context import Budget
from sylvan.runtime.features.grammar.schema import DEFINITIONS, Schema, pointer, resolve
from sylvan.runtime.features.grammar.spec import NotSupportedError

_ONE = frozenset(
    [
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"dependentSchemas", "patternProperties", "properties"})
_NAMES = frozenset(
    ["$anchor", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", *DEFINITIONS]
)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LEGACY = ("draft-03", "draft-04", "draft-06", "draft-07")
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minContains", "maxContains"),
    *("minProperties", "maxProperties"),
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]+")  # which every library recognises in a reference
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def normalised(root: Schema, budget: Budget) -> Schema:
    """Return the schema in the notation of draft 2020-12, with local references.

    Raises:
        RequestError: A reference is external or dangling; the message names its place.
    """
    return _Normaliser(root, budget).run()


class _Normaliser:
    def __init__(self, root: Schema, budget: Budget) -> None:
        self._root, self._budget = root, budget
        self._is_legacy = any(name in str(root.get("$schema")) for name in _LEGACY)
        self._resources: dict[str, Schema] = {"": root}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._dynamic: dict[str, list[Schema]] = {}
        self._addresses: dict[int, str] = {}  # number of schemas
        self._places: dict[int, str] = {}
        self._names: dict[int, str] = {}  # where the referenced schema will be
        self._todo: list[tuple[str, str, Schema]] = []
        self._index(root, "", "#")

    def run(self) -> Schema:
        body = self._schema(self._root, self._address(self._root, ""), "#")
        assert isinstance(body, dict)
        defined: dict[str, dict[str, Any]] = {}
        while self._todo:
            place, address, node = self._todo.pop()
            key, name = self._names[id(node)].split("/")[1:]
            name = name.replace("~1", "/").replace("~0", "~")
            defined.setdefault(key, {})[name] = self._schema(node, address, place)
        return {**body, **defined}

    # ---- names

    def _index(self, node: Any, address: str, at: str) -> None:
        stack = [(node, address, at)]
        while stack:
            node, address, at = stack.pop()
            if not isinstance(node, dict):
                continue
            address = self._enter(node, address)
            self._addresses[id(node)] = address
            self._places[id(node)] = at
            for steps, part in _parts(node):
                stack.append((part, address, pointer(at, *steps)))

    def _enter(self, node: Schema, address: str) -> str:
        """Record the names of a schema; return its base address."""
        own = node.get("$id", node.get("id") if self._is_legacy else None)
        if isinstance(own, str) and not (self._is_legacy and "$ref" in node):
            joined, _, fragment = _joined(address, own).partition("#")
            if fragment:
                self._anchors[joined, fragment] = node
            else:
                address = joined
                self._resources[address] = node
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._anchors[address, node[key]] = node
        if isinstance(node.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(node["$dynamicAnchor"], []).append(node)
        if node.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("", []).append(node)
        return address

    def _address(self, node: Any, otherwise: str) -> str:
        return self._addresses.get(id(node), otherwise)

    # ---- output

    def _schema(self, node: Any, address: str, at: str) -> Any:
        self._budget.spend()
        if not isinstance(node, dict):
            return node
        address = self._address(node, address)
        keys = ["$ref"] if self._is_legacy and "$ref" in node else list(node)
        written: dict[str, Any] = {}
        for key in keys:
            value, here = node[key], pointer(at, key)
            if key in _REFERENCES:
                self._add_reference(written, self._target(key, value, address, here), address)
            elif key == "dependencies" and isinstance(value, dict):
                self._add_dependency(written, value, address, here)
            elif key not in _NAMES and not (key == "id" and self._is_legacy):
                self._keyword(written, key, value, address, here)
        return _modernised(written)

    def _keyword(
        self, written: dict[str, Any], key: str, value: Any, address: str, at: str
    ) -> None:
        """Convert a keyword, and the schemas in it."""
        if key in (*_LISTS, "items") and isinstance(value, list):
            parts = enumerate(value)
            listed = [self._schema(part, address, pointer(at, i)) for i, part in parts]
            written[key] = [*listed, *written.get(key, [])]
        elif key in _MAPS and isinstance(value, dict):
            named = value.items()
            schemas = {n: self._schema(part, address, pointer(at, n)) for n, part in named}
            written[key] = schemas
        elif key in _ONE or key == "additionalItems":
            written[key] = self._schema(value, address, at)
        else:
            written[key] = value

    def _add_reference(self, written: dict[str, Any], target: Any, address: str) -> None:
        if isinstance(target, bool):  # independent of its location
            _add(written, target)
        elif "$ref" in written:  # of two kinds in one schema
            _add(written, {"$ref": self._reference(target, address)})
        else:
            written["$ref"] = self._reference(target, address)

    def _add_dependency(
        self, written: dict[str, Any], value: Schema, address: str, at: str
    ) -> None:
        """Convert `dependencies`, which are names or schemas."""
        for name, part in value.items():
            if isinstance(part, list):
                _add(written, {"dependentRequired": {name: part}})
            else:
                schema = self._schema(part, address, pointer(at, name))
                _add(written, {"dependentSchemas": {name: schema}})

    def _reference(self, target: Any, address: str) -> str:
        if target is self._root:
            return "#"
        if id(target) not in self._names:
            place = self._places.get(id(target), "")
            steps = place.split("/")
            named = len(steps) == 3 and steps[1] in DEFINITIONS
            if named and _PLAIN_NAME.fullmatch(steps[2]):
                self._names[id(target)] = place
            else:
                key = DEFINITIONS[0]
                taken = {*self._names.values(), *(f"#/{key}/{n}" for n in _map(self._root, key))}
                numbers = (f"#/{key}/schema{i}" for i in range(1, len(taken) + 2))
                self._names[id(target)] = next(n for n in numbers if n not in taken)
            self._todo.append((place or "#", self._address(target, address), target))
        return self._names[id(target)]

    def _target(self, key: str, value: Any, address: str, at: str) -> Any:
        if not isinstance(value, str):
            raise RequestError(f"json_schema: {at} must be a string", param="json_schema")
        base, _, fragment = _joined(address, value).partition("#")
        resource = self._resources.get(base)
        if resource is None:
            message = f"json_schema: {at}: {value!r} is not in the schema, and nothing is fetched:"
            message += " put what it refers to under $defs, with this address as its $id"
            raise RequestError(message, param="json_schema")
        if not fragment or fragment.startswith("/"):
            found = resolve(resource, f"#{fragment}")
        else:
            found = self._anchors.get((base, fragment))
        if found is None:
            message = f"json_schema: {at}: there is nothing at {value!r}"
            raise RequestError(message, param="json_schema")
        name = fragment if key == "$dynamicRef" else ""
        others = self._dynamic.get(name, [])
        if key != "$ref" and any(node is found for node in others) and len(others) > 1:
            message = f"json_schema: {at} to one of several schemas is not supported"
            raise NotSupportedError(message, param="json_schema")
        return found


def _joined(address: str, reference: str) -> str:
    return address + reference if reference.startswith("#") else urljoin(address, reference)


def _parts(node: Schema) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Return the subschemas in any draft, with the path to each."""
    for key, value in node.items():
        if (key in _ONE or key == "additionalItems") and isinstance(value, dict):
            yield (key,), value
        elif key in (*_LISTS, "items") and isinstance(value, list):
            yield from (((key, i), part) for i, part in enumerate(value))
        elif key in (*_MAPS, *DEFINITIONS, "dependencies") and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())


def _map(node: Schema, key: str) -> Mapping[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def _add(written: dict[str, Any], schema: Any) -> None:
    """Add a schema that must also hold."""
    written["allOf"] = [*written.get("allOf", []), schema]


def _modernised(node: dict[str, Any]) -> dict[str, Any]:
    """Rename lists of `items` and draft 4 bounds to later drafts; counts become integers."""
    for key in _COUNTS:
        if isinstance(node.get(key), float) and node[key].is_integer():
            node[key] = int(node[key])
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        if "additionalItems" in node:
            node["items"] = node["additionalItems"]
    node.pop("additionalItems", None)
    for key, bound in _EXCLUSIVE.items():
        if isinstance(node.get(key), bool) and node.pop(key) and bound in node:
            node[key] = node.pop(bound)
    return node
