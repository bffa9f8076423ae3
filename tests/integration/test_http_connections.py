"""Connections that take their time, or more than their share, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import pytest

from sylvan.cli.http import HttpServer
from sylvan.config.tree import ServerConfig
from sylvan.runtime.server.connections import ConnectionLimits, Connections
from tests.support.http import Client, checkpoint, engine

__all__ = ["checkpoint", "engine"]

LIMITS = {
    "total": 50,
    "per_address": 50,
    "head_bytes": 8192,
    "head_s": 30.0,
    "body_s": 30.0,
    "write_s": 30.0,
}
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"


@asynccontextmanager
async def served(engine, **limits):
    """The scripted engine on a free port; yields the port and the connections."""
    connections = Connections(ConnectionLimits(**{**LIMITS, **limits}))
    app = Client(engine).app
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with HttpServer(app, ServerConfig(), sock, connections) as server:
            yield server.port, connections


async def sent(port, *parts):
    """The answer to bytes that are sent as they are, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def works(port):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(3):  # over one connection
            reply = await http.post("/generate", json={"text": "ab"})
            assert reply.json()["text"] == "ab"


LARGE = {
    "one header": [HEAD + b"x: " + b"a" * 9000 + b"\r\n\r\n"],
    "one header in parts": [HEAD + b"x: ", *[b"a" * 1000] * 9],
    "many headers": [HEAD + b"".join(b"x%d: a\r\n" % i for i in range(2000)) + b"\r\n"],
    "the path": [b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    "a path in parts": [b"GET /", *[b"a" * 1000] * 9],
}


@pytest.mark.parametrize("kind", LARGE)
async def test_a_large_head_is_refused(engine, kind):
    async with served(engine) as (port, connections):
        answer = await sent(port, *LARGE[kind])

        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"limits.head_bytes" in answer
        assert connections.refused == {"head size": 1}
        await works(port)


@pytest.mark.parametrize("start", [b"", b"P", HEAD])
async def test_a_slow_head_is_refused(engine, start):
    async with served(engine, head_s=0.05) as (port, connections):
        answer = await sent(port, start)

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"limits.head_s" in answer
        assert connections.refused == {"head": 1}
        await works(port)


async def test_a_slow_body_is_refused(engine):
    async with served(engine, body_s=0.05) as (port, _):
        answer = await sent(port, HEAD + b"Content-Length: 1000\r\n\r\n{")

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"limits.body_s" in answer
        assert engine.control.requests == []
        await works(port)


async def test_a_reader_that_does_not_read_is_left(engine):
    engine.control.script = lambda request, prompt: "x" * 1000
    body = b'{"text": "ab", "stream": true, "sampling_params": {"max_new_tokens": 1000, "n": 8}}'
    async with served(engine, write_s=0.05) as (port, connections):
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", port))
            head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
            await asyncio.get_running_loop().sock_sendall(slow, head + body)
            async with asyncio.timeout(60):
                while not connections.refused["write"]:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while engine.manager.num_live:
                await asyncio.sleep(0.01)


async def test_connections_that_ask_nothing_make_room(engine):
    async with served(engine, total=5) as (port, connections):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await works(port)

        assert len(connections) <= 5
        assert connections.refused["idle"] >= 15
        assert connections.refused["total"] == 0
        for _, writer in silent:
            writer.close()


async def test_more_connections_than_there_may_be_are_refused(engine):
    engine.control.hold = True
    body = b'{"text": "ab"}'
    async with served(engine, total=3) as (port, connections):
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in busy:
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(60):
            while len(engine.control.requests) < 3:
                await asyncio.sleep(0.01)

        assert (await sent(port)).startswith(b"HTTP/1.1 503 ")
        assert connections.refused == {"total": 1}
        for _, writer in busy:
            writer.close()
        async with asyncio.timeout(60):
            while len(connections):
                await asyncio.sleep(0.01)
        engine.control.hold = False
        await works(port)


async def test_one_address_does_not_take_all_connections(engine):
    async with served(engine, per_address=2) as (port, connections):
        first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await sent(port)).startswith(b"HTTP/1.1 503 ")
        assert connections.refused == {"address": 1}
        for _, writer in first:
            writer.close()


async def test_many_requests_of_one_connection_are_served(engine):
    async with served(engine, head_bytes=1024) as (port, connections):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(50):
                assert (await http.get("/live")).status_code == 200
        assert not connections.refused
