"""`sylvan health`: checks a server's health, for supervisors and probes."""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from urllib.parse import urlsplit

from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="health [URL] [flags]",
    doc="Check the health of a server or a gateway: exit code 0 if it answers with status 200, "
    "else 1. URL defaults to http://127.0.0.1:30000; unix:PATH uses a Unix socket.",
    options=(
        Option("path", "Path to request; default `/ready`: requests are admitted.", metavar="PATH"),
        Option("timeout", "Seconds to wait for the answer, 5 by default.", metavar="SECONDS"),
    ),
    tree=None,
)

_URL, _PATH, _TIMEOUT_S = "http://127.0.0.1:30000", "/ready", 5.0


def run(args: Parsed) -> int:
    url = args.positions[0] if args.positions else _URL
    path = args.options.get("path") or _PATH
    if not path.startswith("/"):
        raise ConfigError(f"--path: {path!r} does not start with /")
    connection = _connection(url, _seconds(args.options.get("timeout")))
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"{url}{path}: {error}", file=sys.stderr)
        return FAILED
    finally:
        connection.close()
    if status != 200:
        print(f"{url}{path}: status {status}", file=sys.stderr)
    return DONE if status == 200 else FAILED


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text) if text else _TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise ConfigError(f"--timeout: expected seconds up to 3600, got {text!r}")
    return seconds


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:").removeprefix("//"), timeout_s)
    parts = urlsplit(url)
    host = parts.hostname
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from error
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an address: expected http://HOST:PORT or unix:PATH")
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)
