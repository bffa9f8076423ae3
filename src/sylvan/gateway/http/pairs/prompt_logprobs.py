"""Merges the prefill worker's log probabilities of the prompt into the decode worker's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import orjson

from sylvan.gateway.errors import UpstreamError

NAMES = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_DATA = b"data:"

Rows = Mapping[str, list[Any]]


class PromptLogprobsMerge:
    """Puts the prefill worker's log probabilities of the prompt before the decode worker's.

    Args:
        body: The prefill worker's whole answer to `/generate`, streamed or not.

    Raises:
        UpstreamError: The body is malformed.
    """

    def __init__(self, body: bytes) -> None:
        self._rows: dict[int, Rows] = {}
        for index, reply in _replies(body):
            rows = {name: rows for name in NAMES if (rows := _listed(_info(reply), name))}
            if rows:
                self._rows.setdefault(index, rows)
        self._shown: set[int] = set()
        self._rest = b""

    def whole(self, body: bytes) -> bytes:
        """Merge into a whole answer of the decode worker.

        Raises:
            UpstreamError: It is not an answer to `/generate`.
        """
        content = _loaded(body)
        replies = cast("list[Any]", content) if isinstance(content, list) else [content]
        for index, reply in enumerate(replies):
            self._add(index, reply)
        return orjson.dumps(content)

    def events(self, chunk: bytes) -> bytes:
        """Merge into a part of the decode worker's stream; return the complete events.

        Raises:
            UpstreamError: An event is not one of `/generate`.
        """
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        return b"".join(self._event(event) + b"\n\n" for event in events)

    def end(self) -> bytes:
        """Return what follows the last complete event."""
        return self._rest

    def _event(self, event: bytes) -> bytes:
        data = event[len(_DATA) :].strip()
        if not event.startswith(_DATA) or data == b"[DONE]":
            return event
        reply = _loaded(data)
        index = _index(reply)
        if not self._add(index, reply):
            return event
        return b"data: " + orjson.dumps(reply)

    def _add(self, index: int, reply: Any) -> bool:
        """Merge cumulative answers: later events repeat the prompt's values or leave them out."""
        rows, info = self._rows.get(index), _info(reply)
        if rows is None or info is None:
            return False
        first = index not in self._shown
        self._shown.add(index)
        found = {name: held for name, held in rows.items() if first or name in info}
        for name, held in found.items():
            info[name] = [*held, *_listed(info, name)]
        return bool(found)


def _replies(body: bytes) -> Iterator[tuple[int, Any]]:
    if body.lstrip().startswith(_DATA):
        for event in body.split(b"\n\n"):
            data = event.strip().removeprefix(_DATA).strip()
            if data and data != b"[DONE]":
                reply = _loaded(data)
                yield _index(reply), reply
        return
    content = _loaded(body)
    yield from enumerate(cast("list[Any]", content) if isinstance(content, list) else [content])


def _loaded(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("The worker's answer is not JSON.", kind="protocol") from error


def _index(reply: Any) -> int:
    found = cast("dict[str, Any]", reply).get("index") if isinstance(reply, dict) else None
    return found if isinstance(found, int) else 0


def _info(reply: Any) -> dict[str, Any] | None:
    info = cast("dict[str, Any]", reply).get("meta_info") if isinstance(reply, dict) else None
    return cast("dict[str, Any]", info) if isinstance(info, dict) else None


def _listed(info: dict[str, Any] | None, name: str) -> list[Any]:
    value = (info or {}).get(name)
    return cast("list[Any]", value) if isinstance(value, list) else []
