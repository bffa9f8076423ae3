"""Where in a grammar stands what a library refuses: libraries give a reason, and rarely a place."""

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
"""Why a library refuses a schema, a regex or an EBNF grammar; empty if it does not."""

_MOST_PROBES = 2000
_MOST_BYTES = 4 << 20  # of all that is given to the library


def blame(spec: GrammarSpec, reason: str, probe: Probe) -> str:
    """What a client is told of a grammar that is refused: kind, place and reason.

    The place in JSON is a pointer. It is exact as long as the library can be asked often enough
    about the parts, else it points to what the fault is in.
    """
    if spec.kind == "json_schema":
        return _of_schema(spec, reason, probe)
    if spec.kind == "structural_tag":
        for at, leaf in leaves(tree_of(spec)):
            why = probe(leaf)
            if why:
                return within(spec, at, leaf.kind, blame(leaf, why, probe))
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
    """Goes down to the smallest schema that is refused, and to the keyword in it."""

    def __init__(self, root: Schema, probe: Probe) -> None:
        self._root, self._ask = root, probe
        self._definitions = {key: root[key] for key in DEFINITIONS if key in root}
        self._seen: set[str] = set()  # what was referred to
        self._probes = self._bytes = 0

    def run(self, reason: str) -> tuple[str, str]:
        """Place and reason."""
        at, node = "#", self._root
        while True:
            found = self._below(at, node, reason)
            if found is None:
                return self._keyword(at, node, reason), reason
            at, part, reason = found
            if not isinstance(part, dict):
                return at, reason
            node = part

    def _below(self, at: str, node: Schema, reason: str) -> tuple[str, Any, str] | None:
        """A part that is refused for the same reason, or by name: that one's own reason."""
        named: tuple[str, Any, str] | None = None
        for steps, part in children(node):
            if steps[0] in DEFINITIONS:  # only where they are referred to
                continue
            here = pointer(at, *steps)
            why = self._why(part, reason)
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
        return (place, target, reason) if self._why(target, reason) == reason else None

    def _why(self, part: Any, reason: str) -> str:
        if isinstance(part, bool):
            return ""
        if not isinstance(part, dict):
            return reason  # no schema at all
        return self._probe({**self._definitions, **part})

    def _probe(self, schema: Mapping[str, Any]) -> str:
        if self._probes >= _MOST_PROBES or self._bytes > _MOST_BYTES:
            return ""  # before it is written: definitions come with every part
        text = json.dumps(schema)
        self._probes += 1
        self._bytes += len(text)
        return self._ask(GrammarSpec("json_schema", text))

    def _keyword(self, at: str, node: Schema, reason: str) -> str:
        """The place of the one keyword without which the reason is gone."""
        keys = [key for key in node if key not in DEFINITIONS]
        named = [key for key in keys if re.search(rf"(?<![\w$]){re.escape(key)}(?!\w)", reason)]
        if len(named) != 1:
            known = {**self._definitions, **node}
            without = [(key, {k: v for k, v in known.items() if k != key}) for key in keys]
            named = [key for key, rest in without if self._probe(rest) != reason]
        if len(named) > 1:
            named = [key for key in named if key != "type"]
        return pointer(at, named[0]) if len(named) == 1 else at
