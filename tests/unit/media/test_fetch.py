"""Addresses that are fetched, and those that never are."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextlib import asynccontextmanager

import pytest

from sylvan.media.fetch import Fetcher, FetchLimits
from sylvan.media.source import MediaSource
from sylvan.protocol.errors import RequestError


@asynccontextmanager
async def web(answers):
    """A server on loopback; `answers` maps paths to what is written."""
    seen = []

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        seen.append(head)
        if (reply := answers[path]) is None:
            await reader.read()  # until the client gives up
        writer.write(reply or b"")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        done.release()

    done = asyncio.Semaphore(0)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield port, seen
    finally:
        server.close()
        for _ in seen:
            await asyncio.wait_for(done.acquire(), 60)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def moved(where: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode()


async def read(url, **limits):
    fetcher = Fetcher(FetchLimits(**{"fetch": True, "allowed_hosts": ("127.0.0.1",)} | limits))
    try:
        return await fetcher.read(MediaSource("image", "p", url=url))
    finally:
        await fetcher.close()


async def refusal(url, **limits):
    with pytest.raises(RequestError) as error:
        await read(url, **limits)
    assert error.value.param == "p"
    return str(error.value)


async def test_items_are_fetched_where_that_is_allowed():
    async with web({"/a": ok(b"image"), "/b": moved("/a")}) as (port, seen):
        assert await read(f"http://127.0.0.1:{port}/a") == b"image"
        assert await read(f"http://127.0.0.1:{port}/b") == b"image"
        assert all(f"host: 127.0.0.1:{port}" in head.lower() for head in seen)
        assert "media.fetch" in await refusal(f"http://127.0.0.1:{port}/a", fetch=False)
        others = await refusal(f"http://127.0.0.1:{port}/a", allowed_hosts=("example.org",))
        assert "media.allowed_hosts" in others


async def test_sizes_times_statuses_and_redirects_are_bounded():
    answers = {
        "/large": ok(b"x" * 2000),
        "/endless": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        "/gone": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        "/round": moved("/round"),
        "/elsewhere": moved("http://example.org/x"),
        "/strange": moved("gopher://127.0.0.1/x"),
        "/silent": None,
        "/empty": ok(b""),
        "/garbage": b"\x00\x01\x02\r\n\r\n",
    }
    async with web(answers) as (port, _):
        base = f"http://127.0.0.1:{port}"
        assert "media.item_bytes" in await refusal(f"{base}/large", item_bytes=1000)
        assert "media.item_bytes" in await refusal(f"{base}/endless", item_bytes=1000)
        assert "404" in await refusal(f"{base}/gone")
        assert "redirects" in await refusal(f"{base}/round")
        assert "media.allowed_hosts" in await refusal(f"{base}/elsewhere")
        assert "http" in await refusal(f"{base}/strange")
        assert "media.fetch_s" in await refusal(f"{base}/silent", fetch_s=0.3)
        assert "empty" in await refusal(f"{base}/empty")
        assert "cannot be fetched" in await refusal(f"{base}/garbage")
        assert "cannot be fetched" in await refusal("http://127.0.0.1:1/x")


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/x", "http://localhost/x", "http://[::1]/x", "http://0.0.0.0/x"),
        *("http://10.0.0.1/x", "http://192.168.1.1/x", "http://172.16.0.1/x", "http://100.64.0.1/"),
        *(
            "http://169.254.169.254/latest/meta-data",
            "http://[fd00:ec2::254]/",
            "http://[fe80::1]/",
        ),
        *("http://2130706433/x", "http://0x7f000001/x", "http://[::ffff:127.0.0.1]/x"),
        *("http://[64:ff9b::7f00:1]/x", "http://[2002:7f00:1::]/x", "http://224.0.0.1/x"),
        *("http://[64:ff9b:1::7f00:1]/x", "http://[::127.0.0.1]/x"),
        *("http://168.63.129.16/x", "http://192.0.0.192/opc/v2/"),  # of Azure and Oracle
    ],
)
async def test_private_addresses_are_never_fetched_from(url):
    said = await refusal(url, allowed_hosts=())
    assert "private network" in said or "not known" in said or "not an http" in said


@pytest.mark.parametrize(
    "url", ["http://[::", "http://[1]/", "http://a:99999/", "https://", "http:x"]
)
async def test_what_is_no_address_is_refused(url):
    assert "not an http" in await refusal(url, allowed_hosts=())


async def test_a_name_is_looked_up_once_and_all_of_its_addresses_count(monkeypatch):
    async def both(host, port, **_):
        kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kind, ("93.184.216.34", port)), (*kind, ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    assert "private network" in await refusal("http://two-faced.example/x", allowed_hosts=())


async def test_files_are_read_from_allowed_directories_only(tmp_path):
    inside = tmp_path / "open"
    inside.mkdir()
    (inside / "a.png").write_bytes(b"image")
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    allowed = {"allowed_dirs": (str(inside),)}
    assert await read(f"file://{inside}/a.png", **allowed) == b"image"
    wanted = [
        *(f"file://{inside}/../secret", f"file://{tmp_path}/secret", f"file://{inside}/link"),
        *(f"file://{inside}/missing", "file:///etc/passwd", f"file://{inside}/%2e%2e/secret"),
    ]
    words = {await refusal(url, **allowed) for url in wanted}
    assert len(words) == 1  # nothing tells whether a file exists
    assert "media.allowed_dirs" in words.pop()
    assert "media.allowed_dirs" in await refusal(f"file://{inside}/a.png")
    assert "not a file" in await refusal(f"file://{inside}", **allowed)
