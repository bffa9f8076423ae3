"""`/metrics`: what is counted, once each."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sylvan.protocol.messages import Finish
from tests.support.http import Client

LONG = {"max_new_tokens": 40}
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


async def test_time_per_token_is_that_of_each_request_and_of_its_tokens(client):
    # the scripted scheduler says: first token after 2 s, end after 3 s
    for text in ("abc", "abcde", ""):  # with the end token 4 and 6 tokens, and one alone
        client.engine.control.script = lambda request, prompt, said=text: said
        await client.post("/generate", {"text": "x"})
    found = await values(client)
    exposed = (await client.get("/metrics")).text

    assert found["sglang:request_time_per_output_token_seconds_count"] == 2
    assert found["sglang:request_time_per_output_token_seconds_sum"] == pytest.approx(1 / 3 + 1 / 5)
    assert found["sglang:inter_token_latency_seconds_count"] == 3 + 5
    assert found["sglang:inter_token_latency_seconds_sum"] == pytest.approx(2.0)
    for bound, count in (("0.1", 0.0), ("0.2", 5.0), ("0.4", 8.0), ("+Inf", 8.0)):
        line = f'le="{bound}",model_name="scripted"}} {count}'
        assert any(
            row.startswith("sglang:inter_token_latency_seconds_bucket") and line in row
            for row in exposed.splitlines()
        )


async def test_metrics_agree_with_usage(client):
    prompt = output = 0
    for path in ("/v1/chat/completions", "/invocations"):
        usage = (await client.post(path, {**CHAT, "n": 3})).json()["usage"]
        prompt += usage["prompt_tokens"]
        output += usage["completion_tokens"]
    found = await values(client)

    assert found["sglang:prompt_tokens_total"] == prompt
    assert found["sglang:generation_tokens_total"] == output


async def test_probes_are_not_counted_but_a_client_that_borrows_their_name_is(engine, tmp_path):
    digest = hashlib.sha256(b"key").hexdigest()
    entry = {"sha256": digest, "tokens_per_minute": 9}  # a key without a tenant
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"))
    headers = {"authorization": "Bearer key"}

    assert (await client.get("/health_generate")).status_code == 200
    assert (await values(client)).get("sglang:num_requests_total", 0) == 0
    body = {"text": "abcdef", "rid": "HEALTH_CHECK_1", "sampling_params": {"max_new_tokens": 4}}
    statuses = []
    for _ in range(2):
        response = await client.post("/generate", body, headers=headers)
        statuses.append(response.status_code)

    assert statuses == [200, 429]  # ten tokens were charged
    found = await values(client)
    assert found["sglang:num_requests_total"] == 1
    assert found["sglang:prompt_tokens_total"] == 6


async def test_no_client_can_take_the_name_of_a_probe(client):
    await client.get("/health_generate")
    await client.get("/health_generate")

    names = {request.rid for request in client.engine.control.requests}
    assert len(names) == 2
    assert all(len(name) > len("HEALTH_CHECK_") + 30 for name in names)


async def leave(client, path, body, after):
    """Read so many pieces of a stream, then close the connection."""
    sent, left = [], asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) > after:
            left.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await client.app({**scope, "query_string": b""}, receive, send)


async def test_usage_adds_up_to_what_the_engine_made(client):
    """Many at once: several samples, streams, aborts by name, and clients that leave."""
    control, rng = client.engine.control, random.Random(3)
    control.script = lambda request, prompt: "b" * 40
    seen = {"prompt_tokens": 0, "completion_tokens": 0}

    def add(usage):
        for name in seen:
            seen[name] += usage[name]

    async def ask(i):
        body = {"prompt": "a" * (1 + i % 7), "max_tokens": 5 + i, "n": 1 + i % 3}
        add((await client.post("/v1/completions", body)).json()["usage"])

    async def listen(i):
        body = {**CHAT, "max_tokens": 5 + i, "n": 1 + i % 3, "stream": True}
        events = await client.events(
            "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        add(events[-2]["usage"])

    async def aborted(i):
        call = asyncio.create_task(
            client.post("/generate", {"text": "abc", "rid": f"r{i}", "sampling_params": LONG})
        )
        for _ in range(rng.randrange(20, 40)):
            await asyncio.sleep(0)
        await client.post("/abort_request", {"rid": f"r{i}"})
        add((await call).json()["meta_info"])

    async def gone(i):
        body = {"prompt": "abcd", "max_tokens": 30, "stream": True}
        await leave(client, "/v1/completions", body, rng.randrange(2, 9))

    kinds = (ask, listen, aborted, gone)
    await asyncio.gather(*(kinds[i % 4](i) for i in range(40)))
    found = await values(client)

    assert found["sglang:generation_tokens_total"] == control.given
    assert found["sglang:num_requests_total"] == len(control.requests)
    left = found["sglang:generation_tokens_total"] - seen["completion_tokens"]
    assert 10 <= left < 10 * 30  # of the ten that left without an error
    assert found["sglang:prompt_tokens_total"] == seen["prompt_tokens"] + 10 * 4


async def test_one_who_leaves_is_charged_for_what_was_made(engine, tmp_path):
    key = {"sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "tokens_per_minute": 60}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}))
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"))
    engine.control.hold = True
    body = {"prompt": "a" * 61, "max_tokens": 30}
    headers = {"authorization": "Bearer k"}
    call = asyncio.create_task(client.post("/v1/completions", body, headers=headers))
    while not engine.control.requests:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    engine.control.hold = False
    again = await client.post("/v1/completions", body, headers=headers)
    assert again.status_code == 429
    assert "tokens" in again.json()["message"]


async def test_what_the_engine_refuses_costs_nothing(client):
    client.engine.control.hold = True
    call = asyncio.create_task(client.post("/v1/completions", {"prompt": "abc"}))
    while not client.engine.control.requests:
        await asyncio.sleep(0)
    full = Finish(type="abort", message="queue is full", status=503)
    client.engine.manager.abort_all(full)
    assert (await call).status_code == 503
    found = await values(client)

    assert found["sglang:num_requests_total"] == 1
    assert found["sglang:prompt_tokens_total"] == 0


async def test_what_fails_late_has_been_served(client):
    client.engine.control.fail = Finish(type="abort", message="too late", status=503)
    assert (await client.post("/v1/completions", {"prompt": "abc"})).status_code == 503
    found = await values(client)

    assert found["sglang:prompt_tokens_total"] == 3
    assert found["sglang:generation_tokens_total"] == client.engine.control.given == 1


async def test_health_probes_are_not_usage(client):
    client.engine.scheduler.beat()
    assert (await client.get("/health_generate")).status_code == 200

    assert (await values(client)).get("sglang:generation_tokens_total", 0) == 0


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
