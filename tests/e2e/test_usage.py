"""Usage in answers and in the server's counters, against the engine's outputs."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def http(server):
    headers = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as client:
        yield client


async def metrics(http):
    """Sum over labels by name, once the scheduler is idle and has said so."""
    while True:
        text = (await http.get("/metrics")).text
        found = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                found[name] = found.get(name, 0) + float(line.split()[-1])
        if not found["sglang:num_running_reqs"] + found["sglang:num_queue_reqs"]:
            return found
        await asyncio.sleep(0.2)


async def whole(http, i):
    body = {"prompt": f"text {i}", "max_tokens": 5 + i, "n": 1 + i % 3, "ignore_eos": i % 2 == 0}
    return (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"]


async def streamed(http, i):
    body = {"messages": CHAT, "max_tokens": 5 + i, "n": 1 + i % 3, "stream": True}
    body["stream_options"] = {"include_usage": True}
    text = (await http.post("/v1/chat/completions", json=body)).text
    return json.loads(text.split("data: ")[-2])["usage"]["completion_tokens"]


async def aborted(http, i):
    body = {"text": "abc", "rid": f"r{i}", "sampling_params": {"max_new_tokens": 1500}}
    call = asyncio.create_task(http.post("/generate", json=body))
    await asyncio.sleep(0.05 * (1 + i % 5))
    await http.post("/abort_request", json={"rid": f"r{i}"})
    return (await call).json()["meta_info"]["completion_tokens"]


async def left(http, i):
    """Tokens that came before the client closed the connection."""
    body = {"prompt": "abcd", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"continuous_usage_stats": True}
    seen = 0
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                seen = json.loads(line[6:])["usage"]["completion_tokens"]
            if seen > i:
                return seen
    return seen


async def settled(http):
    await asyncio.sleep(1.5)  # a heartbeat
    return await metrics(http)


async def grown(http, work):
    """Usage reported by the calls, and the growth of the server's counters meanwhile."""
    start = await settled(http)
    told = await asyncio.gather(*work)
    end = await settled(http)
    return told, {name: end[name] - start.get(name, 0) for name in end}


async def test_usage_of_many_at_once_is_what_the_engine_made(http):
    work = [(whole, streamed)[i % 2](http, i) for i in range(24)]
    told, more = await grown(http, work)

    assert more["sglang:generation_tokens_total"] == sum(told) > 0
    assert more["sglang:generated_tokens"] == sum(told)
    assert more["sglang:num_requests_total"] == sum(1 + i % 3 for i in range(24))


async def test_tokens_of_those_who_end_early_are_counted_too(http):
    work = [(aborted, left)[i % 2](http, i) for i in range(16)]
    told, more = await grown(http, work)

    # what was under way when a request ended is the engine's loss, not the client's
    counted = more["sglang:generation_tokens_total"]
    assert 0 < sum(told) <= counted <= more["sglang:generated_tokens"]
    assert more["sglang:num_requests_total"] == 16
