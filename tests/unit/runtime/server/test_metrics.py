"""`/metrics`: what is counted, once each."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http import Client

CHAT = {"messages": [{"role": "user", "content": "x"}]}


async def values(client):
    text = (await client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, 0)
            found[sample.name] += sample.value
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "abc", "sampling_params": {"n": 2}}),
        ("/v1/completions", {"prompt": "abc", "n": 2}),
    ],
)
async def test_tokens_are_counted_once(client, path, body, streamed):
    await client.post(path, {**body, "stream": streamed})
    found = await values(client)

    assert found["sglang:prompt_tokens_total"] == 3
    assert found["sglang:generation_tokens_total"] == 8
    assert found["sglang:num_requests_total"] == 2
    assert found["sglang:time_to_first_token_seconds_count"] == 2


async def test_metrics_agree_with_usage(client):
    prompt = output = 0
    for path in ("/v1/chat/completions", "/invocations"):
        usage = (await client.post(path, {**CHAT, "n": 3})).json()["usage"]
        prompt += usage["prompt_tokens"]
        output += usage["completion_tokens"]
    found = await values(client)

    assert found["sglang:prompt_tokens_total"] == prompt
    assert found["sglang:generation_tokens_total"] == output


async def test_calls_are_counted_by_route_and_status(client):
    await client.post("/generate", {})
    await client.post("/generate", {"text": "x"})
    text = (await client.get("/metrics")).text

    line = 'sglang:http_responses_total{endpoint="/generate",method="POST",status_code="400"} 1.0'
    assert line in text
    assert line.replace("400", "200") in text


async def test_abort_of_a_client_is_no_success(client):
    client.engine.control.hold = True
    call = asyncio.create_task(client.post("/generate", {"text": "abc", "rid": "mine"}))
    while not client.engine.control.requests:
        await asyncio.sleep(0)
    await client.post("/abort_request", {"rid": "mine"})
    await call

    assert 'finish="abort_client"' in (await client.get("/metrics")).text


async def test_lag_of_the_event_loop_is_measured(client):
    while (await values(client)).get("sylvan:event_loop_lag_seconds_count", 0) < 1:
        await asyncio.sleep(0.01)


async def test_metrics_can_be_turned_off(engine):
    assert (await Client(engine, metrics=False).get("/metrics")).status_code == 404
