"""An HTTP server that records requests and answers as the test specifies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    body: Any
    headers: dict[str, str]


@dataclass(frozen=True)
class Events:
    """Server-sent events: (event name or None, data) each."""

    events: list[tuple[str | None, Any]]
    done: bool = True  # whether `data: [DONE]` ends them
    wait: threading.Event | None = None  # before the last event


@dataclass(frozen=True)
class Status:
    code: int
    body: Any


Answer = Callable[[Asked], Any]


@dataclass
class WireServer:
    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    broken: threading.Event = field(default_factory=threading.Event)  # a client hung up

    def bodies(self, path: str) -> list[Any]:
        return [a.body for a in self.asked if a.path == path]


@contextmanager
def serving(answer: Answer) -> Iterator[WireServer]:
    """Run a server on a free local port; `answer` returns JSON, `Events` or a `Status`."""
    server = WireServer(answer)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _handler(server: WireServer) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"server_side": server})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_side: WireServer

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.title(): value for name, value in self.headers.items()}
        asked = Asked(method, self.path, json.loads(data) if data else None, headers)
        self.server_side.asked.append(asked)
        answer = self.server_side.answer(asked)
        try:
            if isinstance(answer, Events):
                self._stream(answer)
            elif isinstance(answer, Status):
                self._json(answer.code, answer.body)
            else:
                self._json(200, answer)
        except ConnectionError:
            self.server_side.broken.set()
            self.close_connection = True

    def _json(self, code: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, answer: Events) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i, (name, data) in enumerate(answer.events):
            if answer.wait is not None and i == len(answer.events) - 1:
                answer.wait.wait(10)
            head = "" if name is None else f"event: {name}\n"
            self._chunk(f"{head}data: {json.dumps(data)}\n\n")
        if answer.done:
            self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Quiet."""
