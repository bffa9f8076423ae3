"""Real servers die and hang under streams; the clients do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from subprocess import DEVNULL
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cluster import gateway, until
from tests.support.tiny import write_model

START_S = 120
CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
FLAGS = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1")
TOKENS = 3000
"""Enough work that a stream is still under way when its client has read a few events."""
STREAMS = 12
ATTEMPTS = 5
"""A machine may be so busy that a stream ends before its client reads the first event."""
PULSES = """
import os, signal, sys, time
pids = [int(pid) for pid in sys.argv[1:]]
while True:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.04)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.004)
"""
LONG = {"prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, "seed": 7}


@dataclass
class Process:
    url: str
    pid: int


@contextmanager
def serving(model: str, *flags: str, port: int = 0) -> Iterator[Process]:
    """`sylvan serve` in a process of its own; it is killed at the end."""
    words = ("serve", model, *FLAGS, *flags, "--port", str(port), "--until-eof")
    command = [sys.executable, "-c", CODE, *words]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"Sylvan serves \S+ at (https?://\S+)", line):
                yield Process(found[1], process.pid)
                break
        else:
            pytest.fail("the server did not start")
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(60)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


@contextmanager
def slowed(server: Process) -> Iterator[None]:
    """Let a server compute a tenth of the time, so that its streams last for many seconds.

    Its scheduler must be slow: what a slow API process has not sent yet, it sends at once when it
    runs, and a stream has ended before its client read a few events.
    """
    pids = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
    assert pids, "the scheduler is a process of its own"
    words = [sys.executable, "-c", PULSES, *map(str, pids)]
    pulses = subprocess.Popen(words, stderr=DEVNULL)
    try:
        yield
    finally:
        pulses.kill()
        pulses.wait(60)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def survivor(model):
    with serving(model) as process:
        yield process


@pytest.fixture
def pair(model, survivor):
    """One that may be killed, and one that stays."""
    with serving(model) as process:
        yield process, survivor


COUNTED = {"stream_options": {"include_usage": True}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampled": ("/v1/completions", {**LONG, **COUNTED}),
    "greedy": ("/v1/completions", {**LONG, **COUNTED, "temperature": 0.0}),
    "n": ("/v1/completions", {**LONG, **COUNTED, "n": 3, "max_tokens": 1500}),
    "grammar": (
        "/v1/completions",
        {**LONG, **COUNTED, "ignore_eos": False, "regex": "[a-f]{2000}"},
    ),
    "chat": (
        "/v1/chat/completions",
        {
            **COUNTED,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "seed": 3,
        },
    ),
}


async def read(client: httpx.AsyncClient, path: str, body: dict[str, Any], at=None, act=None):
    """The text of each sample and the last usage; `act` is called at the event of number `at`."""
    texts: dict[int, str] = {}
    usage: Any = None
    count, ended = 0, False
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            count += 1
            for choice in event["choices"]:
                new = choice["text"] if "text" in choice else choice["delta"].get("content")
                texts[choice["index"]] = texts.get(choice["index"], "") + (new or "")
            if event.get("usage"):
                usage = event["usage"]["completion_tokens"]
            if count == at:
                await act()
    assert ended
    return texts, usage


def only_first(front, pair, *, only):
    """Whether the one that stays is kept out of it."""
    spare = front.runtime.registry.by_url(pair[1].url)
    spare.draining = only
    spare.changed()


def losing(front, pair, number):
    """Ways to kill or stop the first worker while it serves."""
    only_first(front, pair, only=True)

    async def lose():
        only_first(front, pair, only=False)
        os.kill(pair[0].pid, number)

    return lose


@pytest.mark.slow
async def test_streams_of_all_kinds_outlive_their_server(model, survivor):
    for _ in range(ATTEMPTS):
        with serving(model) as victim:
            if await all_kinds(victim, survivor) == len(REQUESTS):
                return
    pytest.fail("in each attempt a stream ended before its server was killed")


async def all_kinds(victim, survivor):
    """How many streams went on at the survivor; the other is killed once all have begun."""
    pair = victim, survivor
    async with gateway(*(p.url for p in pair), failover__stall_s=5.0) as front:
        wanted = [await read(front.http, *request) for request in REQUESTS.values()]
        lose = losing(front, pair, signal.SIGKILL)
        begun: list[None] = []

        async def begin():
            begun.append(None)
            if len(begun) == len(REQUESTS):
                await lose()

        streams = (read(front.http, *request, at=1, act=begin) for request in REQUESTS.values())
        with slowed(victim):
            found = dict(zip(REQUESTS, await asyncio.gather(*streams), strict=True))

        assert found == dict(zip(REQUESTS, wanted, strict=True))
        assert front.metric("sylvan_gateway_streams_cut_total") == 0
        assert all(w.num_running == 0 for w in front.runtime.registry.workers)
        return front.metric("sylvan_gateway_streams_continued_total")


@pytest.mark.slow
async def test_a_stream_outlives_a_server_that_hangs(pair):
    async with gateway(*(p.url for p in pair), failover__stall_s=2.0) as front:
        wanted = await read(front.http, *REQUESTS["sampled"])
        act = losing(front, pair, signal.SIGSTOP)

        assert await read(front.http, *REQUESTS["sampled"], at=40, act=act) == wanted


@pytest.mark.slow
async def test_a_whole_answer_outlives_its_server(pair):
    path, body = "/v1/completions", dict(REQUESTS["sampled"][1])
    async with gateway(*(p.url for p in pair), failover__stall_s=5.0) as front:
        del body["stream_options"]
        wanted = (await front.post(path, body)).json()
        lose = losing(front, pair, signal.SIGKILL)
        asked = asyncio.create_task(front.post(path, body))
        await until(lambda: any(w.num_running for w in front.runtime.registry.workers))
        await lose()

        found = (await asked).json()

    assert found["choices"] == wanted["choices"]
    assert found["usage"]["completion_tokens"] == TOKENS


@pytest.mark.slow
async def test_many_streams_outlive_their_servers(model, survivor):
    for _ in range(ATTEMPTS):
        with serving(model) as victim:
            if await many_streams(victim, survivor):
                return
    pytest.fail("every stream ended before its server was killed")


async def many_streams(victim, survivor):
    """How many streams went on at the survivor."""
    path, body = REQUESTS["sampled"]
    urls = victim.url, survivor.url
    async with gateway(*urls, failover__stall_s=5.0, routing__policy="round_robin") as front:
        wanted = await read(front.http, path, body)
        begun: list[None] = []

        async def begin():
            begun.append(None)
            if len(begun) == STREAMS:  # those that have not begun would start over elsewhere
                os.kill(victim.pid, signal.SIGKILL)

        with slowed(victim):
            found = await asyncio.gather(
                *(read(front.http, path, body, at=1, act=begin) for _ in range(STREAMS))
            )

        assert found == [wanted] * STREAMS
        return front.metric("sylvan_gateway_streams_continued_total")


@pytest.mark.slow
async def test_without_another_server_the_stream_ends_with_an_error(model):
    path, body = REQUESTS["sampled"]
    for _ in range(ATTEMPTS):
        with serving(model) as only:
            async with gateway(only.url, failover__stall_s=1.0) as front:

                async def kill(pid=only.pid):
                    os.kill(pid, signal.SIGKILL)

                try:
                    with slowed(only):
                        await read(front.http, path, body, at=1, act=kill)
                except AssertionError as error:
                    assert "is available" in str(error)  # noqa: PT017
                    assert front.metric("sylvan_gateway_streams_cut_total") == 1
                    return
    pytest.fail("every stream ended before its server was killed")


@pytest.mark.slow
async def test_requests_wait_for_a_server_that_restarts(model):
    path, body = "/v1/completions", {**LONG, "max_tokens": 16}
    with serving(model) as first:
        async with gateway(first.url, failover__wait_s=120.0, retry__max_tries=1) as front:
            wanted = (await front.post(path, body)).json()["choices"]
            os.kill(first.pid, signal.SIGKILL)
            lost = await front.post(path, body)  # it meets the dead server first
            await until(lambda: not front.runtime.registry.workers[0].is_healthy)
            asked = [asyncio.create_task(front.post(path, body)) for _ in range(3)]
            port = int(first.url.rpartition(":")[2])
            with ExitStack() as stack:  # the gateway runs in this loop, so a thread starts it
                await asyncio.to_thread(stack.enter_context, serving(model, port=port))
                found = await asyncio.gather(*asked)
            again = [answer.json()["choices"] for answer in found]

    assert lost.status_code in (502, 503)
    assert again == [wanted] * 3


@pytest.mark.slow
async def test_requests_wait_no_longer_than_they_may(model):
    path, body = "/v1/completions", {**LONG, "max_tokens": 16}
    with serving(model) as only:
        async with gateway(only.url, failover__wait_s=1.0, retry__max_tries=1) as front:
            os.kill(only.pid, signal.SIGKILL)
            lost = await front.post(path, body)  # it meets the dead server first
            await until(lambda: not front.runtime.registry.workers[0].is_healthy)
            refused = await front.post(path, body)

    assert lost.status_code in (502, 503)
    assert refused.status_code == 503
    assert "0 of 1 are healthy" in refused.text
