"""The exact index: a gateway that follows what servers say they hold."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from array import array
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.support.cluster import gateway, until
from tests.support.tiny import write_model

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
PAGE = 16


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def servers(model):
    """Two real servers that publish their cache events."""
    processes = []
    for _ in range(2):
        words = ["serve", str(model), "--port", "0", "--load-format", "dummy", "--until-eof"]
        words += ["--device", "cpu", "--threads", "1", "--processes", "one"]
        words += ["--page-size", str(PAGE), "--max-total-tokens", "2048"]
        words += ["--kv-events.endpoint", free_address()]
        words += ["--kv-events.replay-endpoint", free_address()]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", CODE, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        yield [url_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def url_of(process):
    for line in process.stdout:
        if "Sylvan serves" in line:
            return line.split(" at ")[1].split()[0]
    raise AssertionError("the server did not start")


PARAMS = {"max_new_tokens": 1, "temperature": 0}


async def ask(url, ids):
    async with httpx.AsyncClient() as http:
        body = {"input_ids": ids, "sampling_params": PARAMS}
        reply = await http.post(f"{url}/generate", json=body, timeout=60)
    return reply.json()["meta_info"]["cached_tokens"]


def prompt(number):
    return [3 + (number * 31 + i * i) % 200 for i in range(160)]


async def known(front, url):
    await until(lambda: front.runtime.registry.by_url(url) is not None)
    worker = front.runtime.registry.by_url(url)
    blocks = front.runtime._blocks
    await until(lambda: blocks.knows(worker.id))
    return worker, blocks


async def through(front, ids):
    reply = await front.post("/generate", {"input_ids": ids, "sampling_params": PARAMS})
    assert reply.status_code == 200, reply.text
    return reply.json()["meta_info"]["cached_tokens"]


@pytest.mark.slow
async def test_prompts_go_where_they_are_although_the_gateway_never_sent_them_there(servers):
    for number in range(4):
        assert await ask(servers[number % 2], prompt(number)) == 0  # past the gateway
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(gateway(*servers, routing__cache_events=True))
        for url in servers:
            await known(front, url)
        for number in (3, 0, 2, 1):
            assert await through(front, [*prompt(number), 7]) >= 144

        # what a server forgets the gateway forgets, too
        worker, blocks = await known(front, servers[0])
        before = blocks.num_blocks
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{servers[0]}/flush_cache")).status_code == 200
        await ask(servers[0], [5])
        await until(lambda: blocks.num_blocks < before)
        await ask(servers[1], prompt(9))
        await asyncio.sleep(0)
        await until(lambda: held(front, servers[1], prompt(9)) >= 144)
        assert held(front, servers[0], prompt(0)) == 0
        assert await through(front, [*prompt(9), 8]) >= 144
        blocks.check()
        await until(lambda: worker.load == 0)


def held(front, url, ids):
    worker = front.runtime.registry.by_url(url)
    return front.runtime._blocks.matched(array("i", ids).tobytes()).get(worker.id, -1)


@pytest.mark.slow
async def test_texts_are_tokenised_where_the_tokenizer_is_known(servers, model):
    text = json.dumps([f"a text that is long enough {number}" for number in range(8)])
    await ask(servers[0], [*range(7, 7 + 2 * PAGE)])  # it too has something to tell
    async with httpx.AsyncClient() as http:
        body = {"text": text, "sampling_params": PARAMS}
        reply = await http.post(f"{servers[1]}/generate", json=body, timeout=60)
        assert reply.status_code == 200
        tokens = (await http.post(f"{servers[1]}/tokenize", json={"prompt": text})).json()["tokens"]
    changes = {"routing__cache_events": True, "tokens__tokenizer": str(model)}
    async with gateway(*servers, **changes) as front:
        for url in servers:
            await known(front, url)
        await until(lambda: held(front, servers[1], tokens) >= 144)
        holder = front.runtime.registry.by_url(servers[1])
        await until(lambda: holder.foreign_load == 0)  # of requests past the gateway
        # the first request would have it loaded, and not wait for it
        await until(lambda: front.runtime._library.get_loaded(holder) is not None)
        again = await front.post("/generate", {"text": text + "!", "sampling_params": PARAMS})
    assert again.json()["meta_info"]["cached_tokens"] >= 144
