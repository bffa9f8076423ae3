"""The application behind a real socket: clients that leave, are slow, or send too much."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from tests.support.http import Client, checkpoint, engine

__all__ = ["checkpoint", "engine"]

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500, "stream": True}


@asynccontextmanager
async def served(engine, **settings):
    """Serve the scripted engine on a free port; yields the port."""
    app = Client(engine, **settings).app
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server._serve([sock]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield sock.getsockname()[1]
        server.should_exit = True
        await task


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def request(path, body):
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_ends_the_request(engine, path, streamed):
    engine.control.hold = True
    body = {**CHAT, "text": "Hello", "model": "m", "stream": streamed}
    async with served(engine) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(path, body))
        await until(lambda: engine.control.requests)
        writer.close()
        await until(lambda: engine.manager.num_live == 0)

    assert len(engine.control.aborted) == 1


async def test_large_body_is_refused_before_it_is_sent(engine):
    async with served(engine, max_body_bytes=10_000) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for _ in range(20):
            writer.write(b"400\r\n" + b"a" * 1024 + b"\r\n")
        await writer.drain()
        line = await asyncio.wait_for(reader.readline(), 20)
        writer.close()

    assert b" 413 " in line


async def test_slow_reader_gets_everything_and_merged(engine):
    engine.control.script = lambda r, p: "abcdefgh" * 60
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 500}}
    async with served(engine) as port, httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{port}/generate"
        async with http.stream("POST", url, json=body, timeout=30) as response:
            await asyncio.sleep(0.2)  # meanwhile the socket fills up
            text = "".join([part async for part in response.aiter_text()])

    events = [b for b in text.split("\n\n") if b]
    assert json.loads(events[-2][6:])["text"] == "abcdefgh" * 60


async def test_many_clients_with_random_disconnects_leave_nothing_behind(engine):
    rng = random.Random(5)
    engine.control.script = lambda request, prompt: "answer to " + prompt[-12:]

    async def one(http, port, i):
        name = f"client {i:05d}"
        body = {"prompt": name, "max_tokens": 100, "stream": True}
        leave_after = rng.choice([None, None, 0, 1, 5])
        text = ""
        async with http.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60
        ) as response:
            assert response.status_code == 200
            count = 0
            async for line in response.aiter_lines():
                if leave_after is not None and count > leave_after:
                    return
                if line.startswith("data: {"):
                    count += 1
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert text == f"answer to {name}"

    limits = httpx.Limits(max_connections=200)
    async with served(engine) as port, httpx.AsyncClient(limits=limits) as http:
        await asyncio.gather(*(one(http, port, i) for i in range(200)))
        await until(lambda: engine.manager.num_live == 0)
        reply = await http.post(f"http://127.0.0.1:{port}/generate", json={"text": "still here"})
        assert reply.status_code == 200
