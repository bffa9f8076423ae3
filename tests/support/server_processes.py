"""Runs `sylvan serve` in separate processes, as several machines would start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import httpx
import psutil

START_S = 180
FLAGS = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1")
FLAGS = (*FLAGS, "--max-total-tokens", "16Ki", "--dist-timeout", "100", "--port", "0")
PROMPT = {"prompt": "abc", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "seed": 7}


def waited(found: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Started:
    """A process, and its output."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._out: IO[str] = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - closed below
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ},
        )

    @property
    def printed(self) -> str:
        """Everything so far, including errors."""
        with open(self._out.name) as file:
            return file.read()

    @property
    def url(self) -> str:
        """URL of the server, once it has printed it; empty before."""
        found = re.search(r"Sylvan serves \S+ at (http://\S+)", self.printed)
        return found[1] if found else ""

    def ready(self) -> str:
        """Wait for the URL."""

        def told() -> bool:
            assert self.process.poll() is None, self.printed
            return bool(self.url)

        waited(told, "the server did not start")
        return self.url

    def stop(self) -> int:
        """Stop it and its descendants, by force if necessary; return its exit code."""
        below = []
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            for child in below:
                if child.is_running():
                    child.kill()
            assert self.process.stdin is not None
            self.process.stdin.close()
            self._out.close()


@contextmanager
def started(
    module: Sequence[str], *words: object, environ: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """`python -m MODULE WORDS`."""
    made = Started([sys.executable, "-m", *module, *map(str, words)], environ or {})
    try:
        yield made
    finally:
        made.stop()


def completion(url: str) -> str:
    """Return the server's answer."""
    reply = httpx.post(f"{url}/v1/completions", json={"model": "m", **PROMPT}, timeout=60)
    reply.raise_for_status()
    return reply.json()["choices"][0]["text"]
