"""Formats in schemas of a request that say nothing, since nobody knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from sylvan.runtime.features.grammar.rewrite.formats import KNOWN
from sylvan.utils import strict_json

MAX_PARTS = 20_000
"""Of a body, that are looked at."""
MAX_TEXT_CHARS = 1 << 16
"""Of a schema that is given as text."""
_HOLDERS = frozenset(
    {"schema", "json_schema", "parameters", "input_schema", "format", "structures"}
)


def unknown_formats(body: Any) -> list[str]:
    """Names of formats in the schemas of a body that are annotations only, each once.

    Args:
        body: As JSON. Of a very large one the beginning is looked at.
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
            continue  # values
        if key == "json_schema" and isinstance(part, str) and '"format"' in part[:MAX_TEXT_CHARS]:
            yield _read(part), True
        elif isinstance(part, (dict, list)):
            yield part, is_schema or key in _HOLDERS


def _read(text: str) -> Any:
    if len(text) > MAX_TEXT_CHARS:
        return None
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError):  # the engine will say so
        return None
