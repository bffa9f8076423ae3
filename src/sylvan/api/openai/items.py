"""Items of responses and conversations, as the API returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.openai.responses import InputItemsQuery
from sylvan.protocol.errors import RequestError


def page(items: Sequence[dict[str, Any]], query: InputItemsQuery) -> dict[str, Any]:
    """Return a page of a list; items have IDs, oldest first.

    Raises:
        RequestError: `after` is not in the list.
    """
    found = list(items) if query.order == "asc" else list(reversed(items))
    if query.after is not None:
        names = [item["id"] for item in found]
        if query.after not in names:
            raise RequestError(f"after: there is no item {query.after!r}.", param="after")
        found = found[names.index(query.after) + 1 :]
    shown = found[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(found),
    }


def input_item(place: int, item: dict[str, Any], response: str) -> dict[str, Any]:
    """Return an input item of a response, with an ID, and its content as parts.

    Args:
        place: Index in the input.
        item: The item as stored.
        response: ID of the response.
    """
    content = item.get("content")
    kind = item.get("type", "message")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": part, "text": content}]
    named = {"id": f"item_{response.removeprefix('resp_')}_{place}", "type": kind, **item}
    return named if content is None else {**named, "content": content}


def conversation_item(item: dict[str, Any], fresh: str) -> dict[str, Any]:
    """Return an item of a conversation, with a type and an ID; `fresh` is the end of a new ID."""
    kind = item.get("type", "message")
    name = item.get("id")
    if not isinstance(name, str):
        name = f"{'msg' if kind == 'message' else 'item'}_{fresh}"
    return {**item, "type": kind, "id": name}
