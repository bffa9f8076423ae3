"""Runs a real server in separate processes, and reads their resource usage from outside (Linux)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JSON = {"content-type": "application/json"}
START_S = 180


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    log: list[str] = field(default_factory=list)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> tuple[int, float, bytes]:
        """Return status (0: no answer), seconds and content of an answer."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        began = time.perf_counter()
        try:
            connection.request(method, path, raw, {**JSON, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, time.perf_counter() - began, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, time.perf_counter() - began, b""
        finally:
            connection.close()

    def said(self, words: str) -> int:
        """Count the lines of the log with these words."""
        return sum(words in line for line in self.log)


@contextlib.contextmanager
def serving(model: str, *flags: str) -> Iterator[Server]:
    """`sylvan serve MODEL` on a free port of loopback."""
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", model, "--until-eof", "--server.port", "0"]
    process = subprocess.Popen(
        [*command, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    server, up = Server(process, 0), threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            server.log.append(line.rstrip())
            if found := re.search(r"Sylvan serves \S+ at http://\S+:(\d+)", line):
                server.port = int(found[1])
                up.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not up.wait(START_S):
            raise SystemExit("the server did not start:\n" + "\n".join(server.log))
        yield server
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(5)


def family(pid: int) -> dict[int, str]:
    """Return a process and its descendants, with their names."""
    found, waiting = dict[int, str](), [pid]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{one}/cmdline").read_bytes().decode().split("\0")
            name = next((w.rpartition(".")[2] for w in words if "sylvan.runtime" in w), "api")
            found[one] = name.split("(")[0][:40]
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return found


def used(pid: int) -> dict[str, float]:
    """Return private memory in MB, open files and threads of a process."""
    memory = Path(f"/proc/{pid}/smaps_rollup").read_text()
    private = sum(int(n) for n in re.findall(r"Private_\w+: +(\d+) kB", memory))
    return {
        "mb": private / 1024,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


def percentile(values: list[float], share: float) -> float:
    """Return a percentile; 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


STREAM = {
    "text": "The sky is",
    "stream": True,
    "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
}


class Neighbour(threading.Thread):
    """Streams the same request over and over, and records gaps and answers."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.gaps, self.texts = server, list[float](), set[bytes]()
        self.rounds, self._ended = 0, threading.Event()

    def run(self) -> None:
        """Stream until `end` is called."""
        while not self._ended.is_set():
            self.texts.add(self._once())
            self.rounds += 1

    def end(self) -> None:
        """Stop after the current stream."""
        self._ended.set()
        self.join(120)

    def _once(self) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/generate", json.dumps(STREAM), JSON)
        answer = connection.getresponse()
        data, last = b"", time.perf_counter()
        while piece := answer.read1(65536):
            now = time.perf_counter()
            self.gaps.append(now - last)
            data, last = data + piece, now
        connection.close()
        lines = [line for line in data.split(b"\n\n") if line.startswith(b"data: {")]
        final = json.loads(lines[-1][6:]) if lines else {}
        return json.dumps([final.get("text"), final.get("output_ids")]).encode()
