"""Runs Sylvan as its users do: `sylvan serve` in separate processes, over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_PATIENCE_S = 60.0


class Served:
    """A server on this machine, and as many clients as requests run concurrently."""

    def __init__(self, words: Sequence[str], clients: int) -> None:
        """`words` follow `sylvan serve`."""
        import httpx

        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        command = [sys.executable, "-m", "sylvan", "serve", *words, "--port", str(port)]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._crowd = ThreadPoolExecutor(clients)
        limits = httpx.Limits(max_keepalive_connections=clients)
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits, trust_env=False
        )

    def wait(self) -> None:
        """Wait until it is ready."""
        until = time.monotonic() + _PATIENCE_S
        while not self._ready():
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with {self._server.returncode}")
            if time.monotonic() > until:
                raise TimeoutError(f"the server is not ready after {_PATIENCE_S:.0f} s")
            time.sleep(0.05)

    def _ready(self) -> bool:
        import httpx

        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Continue each prompt greedily by exactly this many tokens, one request per prompt."""
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}

        def ask(prompt: list[int]) -> list[int]:
            body = {"input_ids": prompt, "sampling_params": params}
            reply = self._http.post("/generate", json=body).raise_for_status()
            return reply.json()["output_ids"]

        return list(self._crowd.map(ask, prompts))

    def close(self) -> None:
        """Stop the server."""
        self._crowd.shutdown()
        self._http.close()
        self._server.terminate()
        try:
            self._server.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
