"""Prefill and decode apart: the answers of one server, by two that know of each other's KV."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, running
from tests.support.tiny import write_model

FLAGS = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1")
FLAGS = (*FLAGS, "--page-size", "16", "--max-total-tokens", "16Ki", "--chunked-prefill-size", "64")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
ROOMS = itertools.count(1000)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


class Pair:
    """A prefill and a decode server, asked as a gateway asks them."""

    def __init__(self, prefill: Server, decode: Server, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port

    def meeting(self, room: int | None = None) -> dict[str, Any]:
        number = next(ROOMS) * 100 if room is None else room
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        return {**place, "bootstrap_room": number}

    def ask(
        self, path: str, body: dict[str, Any], meeting: dict[str, Any] | None = None
    ) -> tuple[httpx.Response, httpx.Response]:
        """What both answer."""
        both = {**body, **(meeting or self.meeting())}
        with ThreadPoolExecutor(2) as pool:
            urls = (self.prefill.url, self.decode.url)
            replies = [pool.submit(httpx.post, url + path, json=both, timeout=60) for url in urls]
            prefill, decode = (reply.result() for reply in replies)
        return prefill, decode

    def alone(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """What the prefill server answers if it does everything."""
        return httpx.post(self.prefill.url + path, json=body, timeout=60)

    def counts(self, server: Server) -> dict[str, Any]:
        state = httpx.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]
        return state["disaggregation"]


@pytest.fixture(scope="module", params=["tcp", "shm"])
def pair(request, model):
    port = free_port()
    flags = (*FLAGS, "--disaggregation-transfer-backend", request.param)
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running(model, *flags, *prefill) as first,
        running(model, *flags, "--disaggregation-mode", "decode") as second,
    ):
        yield Pair(first, second, port)


def generate(text: str = PROMPT, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
    return {"text": text, "sampling_params": params}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.0, "sampling_seed": 7}], ids=str
)
def test_the_answer_is_that_of_one_server(pair, sampling):
    body = generate(**sampling)
    before = pair.counts(pair.decode)

    prefill, decode = pair.ask("/generate", body)

    assert prefill.status_code == decode.status_code == 200, (prefill.text, decode.text)
    assert decode.json()["output_ids"] == pair.alone("/generate", body).json()["output_ids"]
    assert prefill.json()["output_ids"] == decode.json()["output_ids"][:1]
    after = pair.counts(pair.decode)
    assert after["done"] == before["done"] + 1
    assert after["failed"] == after["refused"] == 0
