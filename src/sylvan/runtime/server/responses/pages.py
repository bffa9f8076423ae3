"""Pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.openai.responses import InputItemsQuery
from sylvan.protocol.errors import RequestError


def page(items: Sequence[dict[str, Any]], query: InputItemsQuery) -> dict[str, Any]:
    """The part of a list that is asked for; items have ids, the oldest comes first.

    Raises:
        RequestError: `after` is none of them.
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
