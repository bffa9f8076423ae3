"""Parses the input file of a batch."""

from __future__ import annotations

import json
from typing import Any

from sylvan.api.openai.batches import MAX_BATCH_LINES
from sylvan.api.strict_json import decode_json
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.stores.batches import Item

MAX_ERRORS = 100


def read_lines(content: bytes, endpoint: str) -> tuple[list[Item], list[dict[str, Any]]]:
    """Return the requests in a file, and the errors of invalid lines."""
    items: list[Item] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    lines = [line for line in content.split(b"\n") if line.strip()]
    if not lines:
        errors.append(_error("empty_file", "The file has no lines.", None))
    if len(lines) > MAX_BATCH_LINES:
        message = f"The file has {len(lines)} lines; the limit is {MAX_BATCH_LINES}."
        return [], [_error("too_many_requests", message, None)]
    for number, line in enumerate(lines, 1):
        try:
            item = _read(number, line, endpoint, seen)
        except RequestError as error:
            errors.append(_error("invalid_request", str(error), number, error.param))
            if len(errors) >= MAX_ERRORS:
                break
        else:
            seen.add(item.custom_id)
            items.append(item)
    return items, errors


def _read(number: int, line: bytes, endpoint: str, seen: set[str]) -> Item:
    value = decode_json(line)
    if not isinstance(value, dict):
        raise RequestError("The line is not a JSON object.")
    custom = value.get("custom_id")
    if not isinstance(custom, str) or not 0 < len(custom) <= 512:
        raise RequestError("custom_id must be a string of 1 to 512 characters.", param="custom_id")
    if custom in seen:
        raise RequestError(f"custom_id {custom[:80]!r} is not unique.", param="custom_id")
    if value.get("method", "POST") != "POST":
        raise RequestError("method must be POST.", param="method")
    if value.get("url", endpoint) != endpoint:
        raise RequestError(f"url must be {endpoint}, as of the batch.", param="url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise RequestError("body must be an object.", param="body")
    if body.get("stream"):
        raise RequestError("body.stream must not be true.", param="body.stream")
    return Item(number, custom, json.dumps(body))


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": param}
