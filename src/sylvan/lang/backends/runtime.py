"""A server process that lives as long as the program: `sylvan.Runtime`."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sylvan.lang.backends._http import HttpClient
from sylvan.lang.backends.runtime_endpoint import RuntimeEndpoint
from sylvan.lang.errors import BackendError
from sylvan.utils.threads import call_in_thread

LAST_PORT = 40000
POLL_S = 0.1
GRACE_S = 10.0  # seconds until a server that does not stop is killed


class LocalServer:
    """Starts a server on a free port, and stops it with the program.

    Pass it to `run(backend=...)` or `set_default_backend`; `endpoint` is the actual backend.

    Args:
        log_level: Of the server.
        launch_timeout: Seconds to wait for the server to start.
        model_path: Model directory; the built-in model if not given.
        server_args: Further options of `sylvan serve`, with underscores for dashes.

    Raises:
        BackendError: the server ended, or did not start in time.
    """

    def __init__(
        self,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        model_path: str | None = None,
        **server_args: Any,
    ) -> None:
        server_args.setdefault("host", "127.0.0.1")
        first = server_args.pop("port", None)
        host = server_args["host"]
        self.port = any_port(host) if first is None else free_port(host, int(first))
        self.url = f"http://{server_args['host']}:{self.port}"
        self.generate_url = f"{self.url}/generate"
        options = {**server_args, "port": self.port, "log_level": log_level}
        command = [sys.executable, "-m", "sylvan", "serve", *flags(model_path, options)]
        # The server ends with its standard input, so it cannot outlive this process.
        self._process = subprocess.Popen(
            [*command, "--quiet", "--until-eof"], stdin=subprocess.PIPE
        )
        atexit.register(self.shutdown)
        self._http = HttpClient(self.url, api_key=server_args.get("api_key"))
        try:
            self._wait(launch_timeout)
            self.endpoint = RuntimeEndpoint(self.url, api_key=server_args.get("api_key"))
        except BaseException:
            self.shutdown()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return self._process.pid if self._process.poll() is None else None

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise BackendError(f"the server ended at start with exit code {code}")
            try:
                self._http.call("GET", "/health_generate")
            except BackendError:
                time.sleep(POLL_S)
            else:
                if self.pid is not None:  # and it is our server that answers
                    return
        raise BackendError(f"the server did not answer within {timeout_s} s")

    def generate(
        self, prompt: str | list[str], sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> str:
        """Generate, and return the server's answer as JSON text."""
        body = {"text": prompt, "sampling_params": sampling_params, **fields}
        return json.dumps(self._http.call("POST", "/generate", body))

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Generate, and yield the text piece by piece."""
        body = {"text": prompt, "sampling_params": sampling_params, "stream": True, **fields}
        chunks: Iterator[Any] = self._http.stream("POST", "/generate", body)
        position = 0
        while (chunk := await call_in_thread(next, chunks, None)) is not None:
            if piece := chunk["text"][position:]:
                position += len(piece)
                yield piece

    add_request = async_generate

    def encode(self, prompt: Any) -> str:
        """Embed, and return the server's answer as JSON text."""
        return json.dumps(self._http.call("POST", "/encode", {"text": prompt}))

    def cache_prefix(self, prefix: str) -> None:
        """Compute and cache a text."""
        self.endpoint.cache_prefix(prefix)

    def start_profile(self) -> None:
        """Start a profile on the server."""
        self.endpoint.start_profile()

    def stop_profile(self) -> None:
        """Stop the profile; the server writes it."""
        self.endpoint.stop_profile()

    async def get_server_info(self) -> Any:
        """The server's info."""
        return await call_in_thread(self.endpoint.get_server_info)

    def shutdown(self) -> None:
        """Stop the server; does nothing if it has ended."""
        atexit.unregister(self.shutdown)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._http.close()
        if self._process.poll() is None:
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def any_port(host: str) -> int:
    """A free port, unlikely to be chosen by another process soon."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def free_port(host: str, first: int) -> int:
    """The first free port from `first` on.

    Raises:
        BackendError: no free port.
    """
    for port in range(first, LAST_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise BackendError(f"no free port from {first} to {LAST_PORT} on {host}")


def flags(model_path: str | None, options: dict[str, Any]) -> list[str]:
    """Arguments of `sylvan serve` for keyword arguments."""
    arguments = [] if model_path is None else [model_path]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments


Runtime = LocalServer
"""As programs written for SGLang call it."""
