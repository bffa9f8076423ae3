"""An upstream that answers at once, and a cheap client: raw HTTP/1.1 on asyncio."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "instant",
    "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}],
}
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "instant",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "word " * 16},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 64, "completion_tokens": 16, "total_tokens": 80},
}
ABOUT = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "instant", "object": "model"}]},
    "/model_info": {"model_path": "instant", "served_model_name": "instant"},
    "/get_model_info": {"model_path": "instant", "served_model_name": "instant"},
    "/server_info": {"model_path": "instant", "served_model_name": "instant", "dp_size": 1},
    "/get_server_info": {"model_path": "instant", "served_model_name": "instant", "dp_size": 1},
}
EVENT = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
NUM_EVENTS = 16
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + (b"%x\r\n" % len(EVENT) + EVENT + b"\r\n") * NUM_EVENTS
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


def whole(content: object, status: str = "200 OK") -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


ANSWER = whole(WHOLE)


class Upstream(asyncio.Protocol):
    """Answers every request on a connection."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            size = 0
            at = head.find(b"content-length:")
            if at >= 0:
                size = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            if not head.startswith((b"get /", b"post /")):  # a probe for HTTP/2
                self._transport.close()
                return
            self._transport.write(self._answer(head, body))

    def _answer(self, head: bytes, body: bytes) -> bytes:
        path = head.split(b" ", 2)[1].decode().partition("?")[0]
        if path in ABOUT:
            return whole(ABOUT[path])
        if path != "/v1/chat/completions":
            return whole({"error": "no such path"}, "404 Not Found")
        return STREAM if b'"stream":true' in body.replace(b" ", b"") else ANSWER


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Upstream, "127.0.0.1", port, backlog=2048)
    print("ready", flush=True)
    await asyncio.Event().wait()


class Connection(asyncio.Protocol):
    """A connection of the client: one request at a time, timed to the last byte."""

    def __init__(self) -> None:
        self._buffer = b""
        self._done: asyncio.Future[bool] | None = None
        self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self.first_s = time.perf_counter()
        self._buffer += data
        if self._complete() and self._done is not None and not self._done.done():
            self._done.set_result(self._buffer.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(False)

    def _complete(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return self._buffer.endswith(b"0\r\n\r\n")
        return len(self._buffer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])

    async def ask(self, request: bytes) -> tuple[bool, float, float]:
        """Return whether the answer was complete, and seconds to its first and last byte."""
        self._buffer = b""
        self._done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._transport.write(request)
        good = await self._done
        return good, self.first_s - began, time.perf_counter() - began


async def connect(port: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    return connection


def request(*, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "What is 17 + 25? " * 12}]
    content = {"model": "instant", "messages": messages, "stream": stream}
    body = json.dumps(content).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve([int(word) for word in sys.argv[1:]]))
