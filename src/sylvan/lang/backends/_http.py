"""A small HTTP client for many threads: connection reuse, cancellation, deadlines.

Uses only the standard library: calls and import are cheap, and another thread can shut down a
connection, which is how servers notice that a program was cancelled.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sylvan.lang.cancel import CancelScope
from sylvan.lang.errors import BackendError

KEEP_S = 4.0  # servers commonly close idle connections after five seconds
MAX_KEPT = 256
CONNECT_TIMEOUT_S = 30.0
_BROKEN = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


@dataclass(slots=True, eq=False)
class _Kept:
    connection: http.client.HTTPConnection
    since: float


class HttpClient:
    """Calls one server. Safe for many threads; each call in progress has its own connection.

    Args:
        base_url: `http://host:port` or `https://...`, with or without a path.
        api_key: Sent as a bearer token.
        verify: File of certificates to trust, instead of the system's.
        timeout_s: Longest time without data from the server; None waits forever.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        verify: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url must be http://host:port or https://..., not {base_url!r}")
        self._host, self._port = url.hostname, url.port
        self._path = url.path.rstrip("/")
        self._tls = ssl.create_default_context(cafile=verify) if url.scheme == "https" else None
        self._headers = {"Content-Type": "application/json; charset=utf-8"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def call(
        self, method: str, path: str, body: Any = None, scope: CancelScope | None = None
    ) -> Any:
        """Make a call and return its JSON, or its text if it is not JSON.

        Raises:
            BackendError: the server is unreachable, or answered with an error.
            ProgramTimeoutError: `scope`'s deadline passed.
        """
        with self._exchange(method, path, body, scope) as response:
            return _decode(response.read())

    def stream(
        self, method: str, path: str, body: Any, scope: CancelScope | None = None
    ) -> Iterator[Any]:
        """Make a call and yield the JSON of its server-sent events. See `call`."""
        with self._exchange(method, path, body, scope) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    response.read()
                    return
                yield json.loads(data)
            if scope is not None:
                scope.check()
            raise BackendError("the server broke off its answer")

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            kept, self._kept = self._kept, []
        for entry in kept:
            entry.connection.close()

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: Any, scope: CancelScope | None
    ) -> Iterator[http.client.HTTPResponse]:
        scope = scope or CancelScope()
        payload = None if body is None else json.dumps(body).encode()
        connection, response = self._send(method, path, payload, scope)
        done = False
        try:
            with scope.on_cancel(lambda: _shut(connection)), _translated(scope):
                if response.status != 200:
                    raise _error(path, response)
                yield response
                done = response.isclosed() and not response.will_close
        finally:
            if done:
                self._keep(connection)
            else:
                connection.close()

    def _send(
        self, method: str, path: str, payload: bytes | None, scope: CancelScope
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and wait for the answer's headers."""
        while True:
            kept = self._take()
            connection = kept or self._connect(scope)
            with scope.on_cancel(lambda c=connection: _shut(c)), _translated(scope):
                try:
                    self._set_timeout(connection, scope)
                    connection.request(method, self._path + path, payload, self._headers)
                    return connection, connection.getresponse()
                except _BROKEN:
                    connection.close()
                    # The server closed an idle connection just as it was reused: retry.
                    if kept is None or scope.cancelled:
                        raise
                except BaseException:
                    connection.close()
                    raise

    def _connect(self, scope: CancelScope) -> http.client.HTTPConnection:
        limits = [CONNECT_TIMEOUT_S, self._timeout_s, scope.remaining_s()]
        timeout = min(limit for limit in limits if limit is not None)
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=self._tls
            )
        with _translated(scope):
            try:
                connection.connect()
            except OSError as error:
                where = f"{self._host}:{self._port or ''}"
                raise BackendError(f"cannot reach the server at {where}: {error}") from error
        return connection

    def _set_timeout(self, connection: http.client.HTTPConnection, scope: CancelScope) -> None:
        limits = [x for x in (self._timeout_s, scope.remaining_s()) if x is not None]
        sock: socket.socket | None = connection.sock
        if sock is not None:
            sock.settimeout(min(limits, default=None))

    def _take(self) -> http.client.HTTPConnection | None:
        oldest = time.monotonic() - KEEP_S
        with self._lock:
            if not self._kept:
                return None
            entry = self._kept.pop()
            stale = self._kept if entry.since < oldest else []
            if stale or entry.since < oldest:
                self._kept = []
        if entry.since >= oldest:
            return entry.connection
        for old in (entry, *stale):
            old.connection.close()
        return None

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._kept) < MAX_KEPT:
                self._kept.append(_Kept(connection, time.monotonic()))
                return
        connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
    """Abort a call that another thread is waiting for."""
    sock: socket.socket | None = connection.sock
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _translated(scope: CancelScope) -> Iterator[None]:
    """Convert network errors to the language's errors."""
    try:
        yield
    except TimeoutError as error:
        scope.check()
        raise BackendError("the server did not answer in time") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        scope.check()
        raise BackendError(f"the connection to the server broke: {error!r}") from error


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _error(path: str, response: http.client.HTTPResponse) -> BackendError:
    content = _decode(response.read())
    message = content
    if isinstance(content, dict):
        message = content.get("error", content.get("message", content))
        if isinstance(message, dict):
            message = message.get("message", message)
    return BackendError(f"{path} answered {response.status}: {message}", status=response.status)
