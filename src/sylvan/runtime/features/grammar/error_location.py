"""Locates the part of a grammar that a library rejects: libraries rarely report a position."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.schema import DEFINITIONS, Schema, children, pointer, resolve
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.structural import leaves, tree_of, within

Probe = Callable[[GrammarSpec], str]
"""Returns a library's error for a schema, a regex or an EBNF grammar; empty if valid."""

_MAX_PROBES = 2000
_MAX_BYTES = 4 << 20  # limit of all text given to the library


def locate_error(spec: GrammarSpec, reason: str, probe: Probe) -> str:
    """Return the error message for a rejected grammar: kind, place and reason.

    The place in JSON is a pointer. It is exact if the parts can be tested within the limit,
    otherwise it names an enclosing part.
    """
    if spec.kind == "json_schema":
        return _of_schema(spec, reason, probe)
    if spec.kind == "structural_tag":
        for at, leaf in leaves(tree_of(spec)):
            why = probe(leaf)
            if why:
                return within(spec, at, leaf.kind, locate_error(leaf, why, probe))
    return f"{spec.kind}: {reason}"


def _of_schema(spec: GrammarSpec, reason: str, probe: Probe) -> str:
    try:
        schema = spec.json()
    except RequestError:
        return f"json_schema: {reason}"
    if not isinstance(schema, dict):
        return f"json_schema: {reason}"
    at, why = _Search(schema, probe).run(reason)
    return f"json_schema: {at}: {why}"


class _Search:
    """Searches for the smallest rejected schema, and the keyword in it."""

    def __init__(self, root: Schema, probe: Probe) -> None:
        self._root, self._ask = root, probe
        self._definitions = {key: root[key] for key in DEFINITIONS if key in root}
        self._seen: set[str] = set()  # visited references
        self._probes = self._bytes = 0

    def run(self, reason: str) -> tuple[str, str]:
        """Return place and reason."""
        at, node = "#", self._root
        while True:
            found = self._rejected_child(at, node, reason)
            if found is None:
                return self._keyword(at, node, reason), reason
            at, part, reason = found
            if not isinstance(part, dict):
                return at, reason
            node = part

    def _rejected_child(self, at: str, node: Schema, reason: str) -> tuple[str, Any, str] | None:
        """Return a part that is rejected for the same reason, or for a reason that names it."""
        named: tuple[str, Any, str] | None = None
        for steps, part in children(node):
            if steps[0] in DEFINITIONS:  # only where they are referenced
                continue
            here = pointer(at, *steps)
            why = self._reason_alone(part, reason)
            if why == reason:
                return here, part, reason
            if why and named is None and f"'{steps[-1]}'" in reason:
                named = here, part, why
        return self._referred(node, reason) or named

    def _referred(self, node: Schema, reason: str) -> tuple[str, Any, str] | None:
        target, place = resolve(self._root, node.get("$ref")), node.get("$ref", "")
        if target is None or place in self._seen:
            return None
        self._seen.add(place)
        return (place, target, reason) if self._reason_alone(target, reason) == reason else None

    def _reason_alone(self, part: Any, reason: str) -> str:
        if isinstance(part, bool):
            return ""
        if not isinstance(part, dict):
            return reason  # not a schema
        return self._probe({**self._definitions, **part})

    def _probe(self, schema: Mapping[str, Any]) -> str:
        if self._probes >= _MAX_PROBES or self._bytes > _MAX_BYTES:
            return ""  # check before serialising: every part includes the definitions
        text = json.dumps(schema)
        self._probes += 1
        self._bytes += len(text)
        return self._ask(GrammarSpec("json_schema", text))

    def _keyword(self, at: str, node: Schema, reason: str) -> str:
        """Return the place of the only keyword whose removal removes the error."""
        keys = [key for key in node if key not in DEFINITIONS]
        named = [key for key in keys if re.search(rf"(?<![\w$]){re.escape(key)}(?!\w)", reason)]
        if len(named) != 1:
            known = {**self._definitions, **node}
            without = [(key, {k: v for k, v in known.items() if k != key}) for key in keys]
            named = [key for key, rest in without if self._probe(rest) != reason]
        if len(named) > 1:
            named = [key for key in named if key != "type"]
        return pointer(at, named[0]) if len(named) == 1 else at
