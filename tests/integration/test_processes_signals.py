"""`sylvan serve` and signals: the first drains, the second ends everything at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.tiny import write_model

PATIENCE_S = 60


@dataclass
class Server:
    """A server of its own process group, and where it is."""

    process: subprocess.Popen[str]
    url: str
    children: list[psutil.Process]

    def stream(
        self, client: httpx.Client, tokens: int, samples: int = 1
    ) -> Iterator[dict[str, object]]:
        params = {"max_new_tokens": tokens, "ignore_eos": True, "n": samples}
        body = {"text": "a", "stream": True, "sampling_params": params}
        with client.stream("POST", f"{self.url}/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def wait_until_it_drains(self) -> None:
        with contextlib.suppress(httpx.HTTPError):  # it may not even accept calls any more
            while httpx.get(f"{self.url}/ready", timeout=PATIENCE_S).status_code == 200:
                continue

    def leaves_nothing(self) -> bool:
        return not psutil.wait_procs(self.children, timeout=PATIENCE_S)[1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = write_model(tmp_path / "model")
    flags = ["--load-format", "dummy", "--port", "0", "--device", "cpu", "--threads", "1"]
    command = [sys.executable, "-m", "sylvan", "serve", str(model), *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError("".join(said))
        children = psutil.Process(process.pid).children(recursive=True)
        yield Server(process, found[0], children)
        process.kill()
        for child in psutil.wait_procs(children, timeout=PATIENCE_S)[1]:
            child.kill()
        process.stdout.read()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_streams_end_and_exits_with_0(server: Server, number: int) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        stream = server.stream(client, tokens=200)
        next(stream)
        os.killpg(server.process.pid, number)
        last = [*stream][-1]

    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
    assert server.process.wait(PATIENCE_S) == 0
    assert server.leaves_nothing()


@pytest.mark.slow
def test_the_second_ctrl_c_ends_everything_at_once(server: Server) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        stream = server.stream(client, tokens=900, samples=64)  # far more than fits in between
        next(stream)
        os.killpg(server.process.pid, signal.SIGINT)
        server.wait_until_it_drains()  # signals that come together are one
        os.killpg(server.process.pid, signal.SIGINT)
        whole = 0
        with contextlib.suppress(httpx.HTTPError):  # cut off, or closed on the way out
            for event in stream:
                reason = event.get("meta_info", {}).get("finish_reason") or {}
                whole += reason.get("type") == "length"

    assert whole < 64
    assert server.process.wait(PATIENCE_S) not in (0, None)
    assert server.leaves_nothing()
