"""A small client of the HTTP API that streams text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from sylvan.protocol.errors import SylvanError

_CONNECT_S = 10.0


class ServerError(SylvanError):
    """The server is unreachable, or rejected the call."""


class ApiClient:
    """A client of one server; use it as a context manager.

    Args:
        url: Base URL, with or without `/v1`.
        transport: HTTP transport, if not TCP.
        api_key: Key for the server.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: httpx.BaseTransport | None = None,
        api_key: str | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self._url,
            headers=headers,
            transport=transport,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        """Whether the server answers and accepts requests."""
        try:
            return self._http.get("/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def model(self) -> str:
        """Return the name of the served model.

        Raises:
            ServerError: The server is unreachable, or rejected the call.
        """
        try:
            reply = self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise ServerError(f"no server answers at {self._url}: {error}") from error
        if reply.is_error:
            raise ServerError(_message(reply))
        return str(reply.json()["data"][0]["id"])

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: object) -> Iterator[str]:
        """Stream the answer to a conversation."""
        body = {"messages": list(messages), **fields}
        for choice in self._stream("/v1/chat/completions", body):
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content")
            if text:
                yield text

    def complete(self, prompt: str, **fields: object) -> Iterator[str]:
        """Stream the continuation of a text."""
        for choice in self._stream("/v1/completions", {"prompt": prompt, **fields}):
            if choice.get("text"):
                yield choice["text"]

    def _stream(self, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
                if reply.is_error:
                    reply.read()
                    raise ServerError(_message(reply))
                yield from _choices(reply.iter_lines())
        except httpx.TransportError as error:
            raise ServerError(f"{self._url} closed the connection: {error}") from error


def over_socket(path: Path) -> ApiClient:
    """Make a client of a local server that listens on a Unix socket."""
    return ApiClient("http://localhost", transport=httpx.HTTPTransport(uds=str(path)))


def _choices(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"].get("message", event["error"])))
        yield from event.get("choices", ())


def _message(reply: httpx.Response) -> str:
    try:
        body = reply.json()
        text = body["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = reply.text[:500]
    return f"the server answered {reply.status_code}: {text}"
