"""Pass-through to servers of the OpenAI API: routing by model, keys, fallbacks, streams."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from sylvan.config.route import ProvidersConfig, RouteConfig, WorkersConfig
from sylvan.config.values import Secret
from sylvan.gateway.openai.upstreams import read_upstreams
from sylvan.protocol.errors import ConfigError
from tests.support.cluster import QUICK, events, gateway, raw, scripted
from tests.support.scripted import write_checkpoint

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@asynccontextmanager
async def passing(tmp_path, content, wait=True, **changes):
    """A gateway with a file of upstreams."""
    file = tmp_path / "providers.json"
    file.write_text(json.dumps(content))
    base = msgspec.structs.replace(QUICK, providers=ProvidersConfig(file=str(file)))
    async with gateway(wait=0, base=base, **changes) as front:
        if wait:
            async with asyncio.timeout(30):
                while (await front.get("/readiness")).status_code != 200:
                    await asyncio.sleep(0.02)
        yield front


def chat(model, **fields):
    return {"model": model, "messages": HELLO, **fields}


async def test_models_go_to_their_servers(checkpoint, tmp_path):
    async with (
        scripted(checkpoint, served_model_name="small", api_key=Secret("a-key")) as a,
        scripted(checkpoint, served_model_name="large") as b,
    ):
        content = {
            "upstreams": [
                {"url": f"{a.url}/v1", "api_key": "a-key", "models": {"fast": "small"}},
                {"url": f"{b.url}/v1"},
            ]
        }
        async with passing(tmp_path, content) as front:
            async with asyncio.timeout(30):
                while len((await front.get("/v1/models")).json()["data"]) < 2:
                    await asyncio.sleep(0.02)
            fast = await front.post("/v1/chat/completions", chat("fast"))
            large = await front.post("/v1/completions", {"model": "large", "prompt": "x"})
            unknown = await front.post("/v1/chat/completions", chat("small"))
            nameless = await front.post("/v1/chat/completions", {"messages": HELLO})
        assert (fast.status_code, large.status_code) == (200, 200)
        assert fast.json()["model"] == "small"  # as the server calls it
        assert len(a.engine.control.requests) == len(b.engine.control.requests) == 1
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert "fast, large" in unknown.json()["error"]["message"]
        assert nameless.status_code == 400
        [headers] = a.paths("/v1/chat/completions")
        assert headers["authorization"] == "Bearer a-key"


async def test_streams_are_passed_on_byte_for_byte(checkpoint, tmp_path):
    async with scripted(checkpoint) as a:
        body = chat("scripted", stream=True, rid="same", stream_options={"include_usage": True})
        content = {"upstreams": [{"url": f"{a.url}/v1", "models": ["scripted"]}]}
        async with passing(tmp_path, content) as front, httpx.AsyncClient() as direct:
            expected = await direct.post(f"{a.url}/v1/chat/completions", json=body)
            found = await front.post("/v1/chat/completions", body)

        def content_of(text):
            return [e if e == "[DONE]" else e["choices"] for e in events(text)]

        assert found.headers["content-type"] == expected.headers["content-type"]
        assert content_of(found.text) == content_of(expected.text)


async def test_others_stand_in_until_the_first_byte(checkpoint, tmp_path):
    async def overloaded(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nfull"
        )
        await writer.drain()

    async with scripted(checkpoint) as b, raw(overloaded) as a:
        content = {
            "upstreams": [
                {"url": "http://127.0.0.1:9/v1", "models": ["best"]},
                {"url": f"{a}/v1", "models": ["best", "only"]},
                {"url": f"{b.url}/v1", "models": {"cheap": "scripted"}},
            ],
            "fallbacks": {"best": ["cheap"]},
        }
        async with passing(tmp_path, content) as front:
            best = await front.post("/v1/chat/completions", chat("best", stream=True))
            only = await front.post("/v1/chat/completions", chat("only"))
        assert best.status_code == 200
        assert best.text.endswith("data: [DONE]\n\n")
        assert (only.status_code, only.text) == (429, "full")
        assert only.headers["retry-after"] == "7"


async def test_a_stream_that_breaks_ends_with_an_error(tmp_path):
    async def cut(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        )
        writer.write(head + b'\r\nd\r\ndata: {"a":1}\r\n')
        await writer.drain()

    async with raw(cut) as url:
        content = {"upstreams": [{"url": url, "models": ["m"]}]}
        async with passing(tmp_path, content) as front:
            reply = await front.post("/v1/chat/completions", chat("m", stream=True))
        assert reply.status_code == 200
        assert "error" in reply.text
        assert "[DONE]" not in reply.text


async def test_what_the_client_did_wrong_is_not_tried_elsewhere(checkpoint, tmp_path):
    async with scripted(checkpoint) as a, scripted(checkpoint) as b:
        urls = [{"url": f"{w.url}/v1", "models": ["scripted"]} for w in (a, b)]
        async with passing(tmp_path, {"upstreams": urls}) as front:
            reply = await front.post("/v1/chat/completions", chat("scripted", temperature=-1))
        assert reply.status_code == 400
        assert b.calls == []


async def test_keys_of_the_gateway_stay_here_and_those_of_clients_continue(checkpoint, tmp_path):
    async with scripted(checkpoint) as a:
        content = {"upstreams": [{"url": f"{a.url}/v1", "models": ["scripted"]}]}
        mine = {"authorization": "Bearer mine", "x-sylvan-ticket": "forged"}
        async with passing(tmp_path, content) as front:
            await front.post("/v1/chat/completions", chat("scripted"), headers=mine)
        async with passing(tmp_path, content, server__api_key=Secret("mine")) as front:
            assert (await front.post("/v1/chat/completions", chat("scripted"))).status_code == 401
            await front.post("/v1/chat/completions", chat("scripted"), headers=mine)
        open_front, guarded = a.paths("/v1/chat/completions")
        assert open_front["authorization"] == "Bearer mine"
        assert "authorization" not in guarded
        assert "x-sylvan-ticket" not in {**open_front, **guarded}


async def test_other_routes_are_not_there(checkpoint, tmp_path):
    async with scripted(checkpoint) as a:
        content = {"upstreams": [{"url": f"{a.url}/v1", "models": ["m"]}]}
        async with passing(tmp_path, content) as front:
            assert (await front.post("/generate", {"text": "x"})).status_code == 404
            assert (await front.get("/workers")).status_code == 404


def providers(tmp_path, content, **changes):
    file = tmp_path / "providers.yaml"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_upstreams(RouteConfig(providers=ProvidersConfig(file=str(file)), **changes))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"upstreams": []}, "give an upstream"),
        ({"upstreams": [{"url": "ftp://x"}]}, "is not the address of a server"),
        ({"upstreams": [{"url": "http://x", "keys": 1}]}, "keys"),
        ({"upstreams": [{"url": "http://x", "api_key": "env:NOT_SET_ANYWHERE"}]}, "NOT_SET"),
        ("upstreams: [", "providers.yaml"),
        ({"upstreams": [{"url": "http://x"}], "fallbacks": {"a": "b"}}, "fallbacks"),
    ],
)
def test_malformed_files_are_refused(tmp_path, content, why):
    with pytest.raises(ConfigError, match=why):
        providers(tmp_path, content)


def test_keys_come_from_variables_and_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("UPSTREAM_KEY", "sesame")
    found = providers(
        tmp_path, {"upstreams": [{"url": "http://x/", "api_key": "env:UPSTREAM_KEY"}]}
    )
    assert found.upstreams[0].api_key == "sesame"


def test_addresses_alone_will_do():
    config = RouteConfig(
        providers=ProvidersConfig(urls=("http://a:1",)),
        workers=WorkersConfig(urls=("http://b:2/openai/v1",), api_key=Secret("k")),
    )
    first, second = read_upstreams(config).upstreams
    assert (first.url, second.url) == ("http://a:1/v1", "http://b:2/openai/v1")
    assert first.api_key == second.api_key == "k"


async def test_forms_are_passed_on(checkpoint, tmp_path):
    async with scripted(checkpoint, served_model_name="small") as worker:
        content = {"upstreams": [{"url": f"{worker.url}/v1", "models": {"fast": "small"}}]}
        async with passing(tmp_path, content) as front:
            files = {"file": ("a.wav", b"RIFF", "audio/wav")}
            for name, status, says in (
                ("fast", 400, "does not accept audio"),
                ("other", 404, "other"),
            ):
                found = await front.http.post(
                    "/v1/audio/transcriptions", data={"model": name}, files=files
                )
                assert found.status_code == status, found.text
                assert says in found.text
            lacking = await front.http.post("/v1/audio/transcriptions", files=files)
            assert lacking.status_code == 400
            assert "model" in lacking.text
