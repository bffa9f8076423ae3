"""Servers that tell gateways where they are: `sylvan serve --register`."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys

import pytest

from sylvan.config.values import Secret
from sylvan.runtime.server.registration import Registration, RegistrationInfo
from tests.support.cluster import gateway, raw, scripted, until
from tests.support.scripted import write_checkpoint
from tests.support.tiny import write_model

OPERATORS = (Secret("ci:ci:admin:sesame"),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


def presence(gateways, url, **changes):
    return RegistrationInfo(gateways=gateways, url=url, interval_s=0.05, **changes)


def urls(front):
    return [worker.url for worker in front.runtime.registry.workers]


async def test_a_server_is_known_as_long_as_it_is_there(checkpoint):
    async with scripted(checkpoint) as worker, gateway(wait=0) as front:
        async with Registration(presence([front.url], worker.url)):
            await until(lambda: urls(front) == [worker.url])
            reply = await front.post("/v1/completions", {"model": "scripted", "prompt": "x"})
            assert reply.status_code == 200
        await until(lambda: urls(front) == [])


async def test_a_gateway_that_has_forgotten_it_is_notified_again(checkpoint):
    async with (
        scripted(checkpoint) as worker,
        gateway(wait=0) as front,
        Registration(presence([front.url], worker.url)),
    ):
        await until(lambda: urls(front) == [worker.url])
        known = front.runtime.registry.workers[0]
        front.runtime.jobs.remove(known)
        await until(lambda: urls(front) == [])
        await until(lambda: urls(front) == [worker.url])
        assert front.runtime.registry.workers[0] is not known


async def test_a_server_that_is_known_already_leaves_all_the_same(checkpoint):
    async with scripted(checkpoint) as worker, gateway(worker.url) as front:
        async with Registration(presence([front.url], worker.url)) as registration:
            await until(lambda: all(entry.worker_id for entry in registration._entries))
        await until(lambda: urls(front) == [])


async def test_gateways_may_come_later_and_want_keys(checkpoint, caplog):
    async with (
        scripted(checkpoint) as worker,
        gateway(wait=0, control__api_keys=OPERATORS) as front,
    ):
        async with Registration(presence([front.url, "http://127.0.0.1:9"], worker.url)):
            await until(lambda: len(caplog.records) >= 2)
        told = " ".join(record.getMessage() for record in caplog.records)
        assert "status 401" in told
        assert urls(front) == []
        known = presence([front.url], worker.url, operator_key="sesame")
        assert "sesame" not in repr(known)
        async with Registration(known):
            await until(lambda: urls(front) == [worker.url])


async def test_garbage_from_a_gateway_harms_nothing(caplog):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 3\r\n\r\n[1]")
        await writer.drain()

    async with raw(answer) as url, Registration(presence([url], "http://127.0.0.1:9")):
        await until(lambda: any("cannot register" in r.getMessage() for r in caplog.records))


@contextlib.contextmanager
def serving(model, *flags):
    words = [sys.executable, "-m", "sylvan", "serve", str(model), "--load-format", "dummy"]
    words += ["--device", "cpu", "--threads", "1", "--port", "0", "--until-eof", *flags]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"serves tiny at (http://\S+) ", line):
                yield process, found[1]
                break
        else:
            pytest.fail("the server did not start")
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


@pytest.mark.slow
async def test_the_command_registers_and_leaves(tmp_path):
    model = write_model(tmp_path / "tiny")
    async with gateway(wait=0) as front:
        with serving(model, "--register", front.url, "--api-key", "mine") as (process, url):
            await until(lambda: urls(front) == [url])
            reply = await front.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 200
            process.send_signal(signal.SIGTERM)
            await until(lambda: urls(front) == [])
            assert process.wait(60) == 0
