"""Limits of repetition counts: libraries truncate large numbers, or run out of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.schema import Schema, pointer, walk
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.structural import leaves, tree_of, within

MAX_COUNT = 100_000
"""Largest repetition count in a regex, a rule, a tag or a schema."""

_AT_LEAST = ("minLength", "minItems", "minProperties", "minContains")
_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_REPEAT = r"\{\s*(?P<least>\d+)?\s*(?:,\s*(?P<most>\d+)?\s*)?\}"
_OF_REGEX = re.compile(rf"\\.|{_CLASS}|{_REPEAT}", re.DOTALL)
_OF_EBNF = re.compile(
    rf"""\\.|"(?:\\.|[^"\\\n])*"|{_CLASS}|{_REPEAT}|~\s*(?P<from>\d+)(?:\s*\.\.\s*(?P<to>\d+))?""",
    re.DOTALL,
)


def check_counts(spec: GrammarSpec) -> None:
    """Reject counts beyond what libraries and outputs can reach.

    Raises:
        RequestError: A count is too large; the message names the place and the limit.
    """
    match spec.kind:
        case "regex":
            _check_text(_OF_REGEX, spec.text, "regex", "regex")
        case "ebnf":
            _check_text(_OF_EBNF, spec.text, "ebnf", "ebnf")
        case "json_schema":
            schema = spec.json()
            if isinstance(schema, dict):
                _check_schema(schema)
        case "structural_tag":
            _check_tags(spec)
        case _:
            pass


def _check_schema(schema: Schema) -> None:
    for at, node in walk(schema):
        for key in _AT_LEAST:
            least = node.get(key)
            if isinstance(least, int | float) and least > MAX_COUNT:
                raise _too_many(f"json_schema: {pointer(at, key)}", "json_schema")
        for place, pattern in _patterns(at, node):
            _check_text(_OF_REGEX, pattern, f"json_schema: {place}", "json_schema")


def _patterns(at: str, node: Schema) -> Iterator[tuple[str, str]]:
    pattern, named = node.get("pattern"), node.get("patternProperties")
    if isinstance(pattern, str):
        yield pointer(at, "pattern"), pattern
    if isinstance(named, dict):
        yield from ((pointer(at, "patternProperties", name), name) for name in named)


def _check_tags(spec: GrammarSpec) -> None:
    tree = tree_of(spec)
    for at, leaf in leaves(tree):
        try:
            check_counts(leaf)
        except RequestError as error:
            message = within(spec, at, leaf.kind, str(error))
            raise RequestError(message, param="structural_tag") from None
    stack: list[tuple[str, Any]] = [("#/format", tree)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, list):
            stack += [(pointer(at, i), part) for i, part in enumerate(node)]
        elif isinstance(node, dict):
            for key in ("min", "max") if node.get("type") == "repeat" else ():
                if isinstance(node.get(key), int) and node[key] > MAX_COUNT:
                    raise _too_many(f"structural_tag: {pointer(at, key)}", "structural_tag")
            stack += [(pointer(at, key), part) for key, part in node.items()]


def _check_text(marks: re.Pattern[str], text: str, where: str, kind: str) -> None:
    for found in marks.finditer(text):
        for digits in found.groupdict().values():
            # parsing a number of a million digits takes Python minutes
            if digits and (len(digits.lstrip("0")) > 9 or int(digits) > MAX_COUNT):
                raise _too_many(f"{where}: at position {found.start() + 1}: {{...}}", kind)


def _too_many(what: str, kind: str) -> RequestError:
    return RequestError(f"{what} asks for more than {MAX_COUNT} repetitions", param=kind)
