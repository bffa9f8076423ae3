"""A rolling update under load, in the order in which the chart's pods are replaced.

A new server comes up and is ready, it is listed; an old one is taken off the list, and gets SIGTERM
after a pause, as by `preStop`. Nothing of a stream may be lost.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_proxies import PATIENCE_S, free_port, until
from tests.support.tiny import write_model

CLIENTS, TOKENS, PAUSE_S = 4, 120, 1.0


class Rollout:
    """Servers behind a gateway that reads a list of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = str(write_model(folder / "model"))
        self._list = folder / "workers.json"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._listed: list[str] = []
        self._write()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ["--discovery.file", str(self._list), "--discovery.interval-s", "0.2"]
        words += ["--observe.metrics-port", "none", "--routing.policy", "round_robin"]
        words += ["--workers.startup-interval-s", "0.1"]
        self.gateway = self._run("gateway", "route", "--port", str(port), *words)

    def _run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "sylvan", *words]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def start(self, name: str) -> None:
        """A server is started, becomes ready, and is listed."""
        port = free_port()
        words = ["--load-format", "dummy", "--device", "cpu", "--threads", "1"]
        words += ["--processes", "one", "--port", str(port), "--server.drain-s", "60"]
        self._servers[name] = self._run(name, "serve", self._model, *words)
        url = f"http://127.0.0.1:{port}"
        until(lambda: httpx.get(f"{url}/ready").status_code == 200, self._folder / f"{name}.log")
        self._listed.append(url)
        self._write()
        until(lambda: url in self._known())

    def stop(self, name: str) -> int:
        """A server is taken off the list, hears SIGTERM later, and may end what it does."""
        url = self._listed.pop(0)
        self._write()
        until(lambda: url not in self._known())
        time.sleep(PAUSE_S)  # the chart's preStop
        process = self._servers.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)

    def close(self) -> None:
        """Everything ends."""
        for process in (*self._servers.values(), self.gateway):
            process.kill()
            process.wait()

    def _write(self) -> None:
        new = self._list.with_suffix(".new")
        new.write_text(json.dumps({"workers": [{"url": url} for url in self._listed]}))
        new.replace(self._list)

    def _known(self) -> str:
        return httpx.get(f"{self.url}/workers", timeout=PATIENCE_S).text


class Load:
    """Clients that stream one answer after another."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/generate"
        self._over = threading.Event()
        self.texts: list[str] = []
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._client) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _client(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._over.is_set():
                try:
                    self.texts.append(self._stream(client))
                except (httpx.HTTPError, AssertionError) as error:
                    self.faults.append(repr(error))

    def _stream(self, client: httpx.Client) -> str:
        params = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
        body = {"text": "once", "stream": True, "sampling_params": params}
        with client.stream("POST", self._url, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["meta_info"]["completion_tokens"] == TOKENS
        return last["text"]


@pytest.mark.slow
def test_servers_are_replaced_one_after_another_and_no_stream_is_lost(tmp_path):
    rollout = Rollout(tmp_path)
    try:
        until(lambda: httpx.get(f"{rollout.url}/live").status_code == 200, tmp_path / "gateway.log")
        for name in ("old-1", "old-2"):
            rollout.start(name)
        until(lambda: httpx.get(f"{rollout.url}/ready").status_code == 200)
        with Load(rollout.url) as load:
            until(lambda: len(load.texts) >= CLIENTS)
            for old, new in (("old-1", "new-1"), ("old-2", "new-2")):
                rollout.start(new)
                assert rollout.stop(old) == 0
            done = len(load.texts)
            until(lambda: len(load.texts) >= done + CLIENTS)
        assert load.faults == []
        assert len(set(load.texts)) == 1
    finally:
        rollout.close()
