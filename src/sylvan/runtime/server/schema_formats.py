"""Finds unknown `format` names in a request's schemas; they have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from sylvan.runtime.features.grammar.rewrite.formats import KNOWN
from sylvan.utils import strict_json

MAX_PARTS = 20_000
"""Number of values in a body that are scanned."""
MAX_TEXT_CHARS = 1 << 16
"""Size of a schema given as text that is scanned."""
_HOLDERS = frozenset(
    {"schema", "json_schema", "parameters", "input_schema", "format", "structures"}
)


def unknown_formats(body: Any) -> list[str]:
    """Return the unknown `format` names in the schemas of a body, without duplicates.

    Args:
        body: The body as JSON values. Only the beginning of a very large body is scanned.
    """
    found: dict[str, None] = {}
    stack: list[tuple[Any, bool]] = [(body, False)]
    for _ in range(MAX_PARTS):
        if not stack:
            break
        value, is_schema = stack.pop()
        if isinstance(value, Mapping):
            node = cast("Mapping[str, Any]", value)
            name = node.get("format")
            if is_schema and isinstance(name, str) and name not in KNOWN:
                found[name] = None
            stack += _parts(node, is_schema=is_schema)
        elif isinstance(value, list):
            stack += [(part, is_schema) for part in cast("list[Any]", value)]
    return list(found)


def _parts(node: Mapping[str, Any], *, is_schema: bool) -> Iterator[tuple[Any, bool]]:
    for key, part in node.items():
        if is_schema and key in ("enum", "const", "default", "examples"):
            continue  # number of values
        if key == "json_schema" and isinstance(part, str) and '"format"' in part[:MAX_TEXT_CHARS]:
            yield _read(part), True
        elif isinstance(part, (dict, list)):
            yield part, is_schema or key in _HOLDERS


def _read(text: str) -> Any:
    if len(text) > MAX_TEXT_CHARS:
        return None
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):  # the engine will report the error
        return None
