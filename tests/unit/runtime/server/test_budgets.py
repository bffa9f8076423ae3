"""Limits of calls are settings: refusals name them, and a metric counts them."""

from __future__ import annotations

import asyncio
import json

import pytest

from sylvan.utils.loop_watch import LoopStall
from tests.support.http import Client, two_tenants

DEADLINE_S = 60


def body(**fields):
    return json.dumps({"text": "x", **fields})


def values(count):
    return body(extra=[0] * count)


CASES = {
    "limits.body_values": ({"body_values": 9}, values(20), 413),
    "limits.body_depth": (
        {"body_depth": 8},
        body(extra=[[[[[[[[[]]]]]]]]]),
        400,
    ),
    "limits.body_names": (
        {"body_names": 4},
        body(**{f"f{i}": 0 for i in range(9)}),
        400,
    ),
    "limits.bodies_bytes": ({"bodies_bytes": 10}, body(), 503),
    "limits.samples": ({"samples": 2}, json.dumps({"text": ["x"] * 3}), 400),
    "server.max_body_bytes": ({"max_body_bytes": 10}, body(), 413),
}


async def counted(client, setting):
    text = (await client.get("/metrics")).text
    return f'sylvan:refusals_total{{setting="{setting}"}} 1.0' in text


@pytest.mark.parametrize("setting", CASES)
async def test_a_call_beyond_a_budget_is_refused_by_its_name(engine, setting):
    settings, content, status = CASES[setting]
    client = Client(engine, **settings)
    headers = {"content-type": "application/json"}

    answer = await client.http.post("/generate", content=content, headers=headers)

    assert answer.status_code == status, answer.text
    assert setting in answer.json()["error"]["message"]
    assert await counted(client, setting)
    assert client.context.bodies.held == 0


async def test_texts_that_are_only_read_are_bounded(engine):
    client = Client(engine, text_chars=10)

    answer = await client.post("/tokenize", {"prompt": "x" * 11})

    assert answer.status_code == 413
    assert "limits.text_chars" in answer.text
    assert await counted(client, "limits.text_chars")


async def test_large_bodies_are_the_same_as_small_ones(engine):
    """They are decoded in a thread."""
    client = Client(engine)
    small = await client.post("/generate", {"text": "x"})
    large = await client.post("/generate", {"text": "x", "extra": "y" * 100_000})
    wrong = await client.post("/generate", {"text": 5, "extra": "y" * 100_000})

    assert large.json()["text"] == small.json()["text"]
    assert large.headers["x-sylvan-ignored-fields"] == "extra"
    assert wrong.status_code == 400
    assert "text" in wrong.json()["error"]["message"]


async def test_others_continue_while_a_large_body_is_decoded(client):
    """For all contents."""
    order: list[str] = []

    async def call(name, content):
        headers = {"content-type": "application/json"}
        answer = await client.http.post("/generate", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        order.append(name)

    large = '{"text":"x","extra":[' + '{"a":1},' * 500_000 + "0]}"
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(call("large", large), *(call("small", body()) for _ in range(5)))

    assert order == ["small"] * 5 + ["large"]


async def test_a_tenant_has_only_so_many_calls_under_way(engine, tmp_path):
    client = two_tenants(engine, tmp_path, calls_per_tenant=1)
    red, blue = ({"authorization": f"Bearer {name}"} for name in ("red", "blue"))
    stream = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 5}}

    async with (
        asyncio.timeout(DEADLINE_S),
        client.http.stream("POST", "/generate", json=stream, headers=red),
    ):
        pass
    end = client.context.calls.begin(client.context.keyring.find("red"))
    refused = await client.post("/generate", {"text": "x"}, headers=red)
    other = await client.post("/generate", {"text": "x"}, headers=blue)
    end()
    again = await client.post("/generate", {"text": "x"}, headers=red)

    assert refused.status_code == 429
    assert "limits.calls_per_tenant" in refused.text
    assert (other.status_code, again.status_code) == (200, 200)
    assert len(client.context.calls) == 0


@pytest.mark.parametrize("where", ["tools", "tool_calls", "content"])
async def test_conversations_that_no_context_can_hold_are_not_rendered(client, where):
    """Wherever in them the text is."""
    text = "x" * (300 * client.context.engine.facts.context_len)
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"p": {"enum": [text]}}},
    }
    messages = [{"role": "user", "content": "x"}]
    if where == "tool_calls":
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        messages += [{"role": "assistant", "tool_calls": [call]}]
    if where == "content":
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    tools = [{"type": "function", "function": function}] if where == "tools" else None

    answer = await client.post("/v1/chat/render", {"messages": messages, "tools": tools})

    assert answer.status_code == 400
    assert "characters, far more than as many tokens hold" in answer.text


async def test_probes_of_health_share_one_request(engine):
    """It needs no key, and a probe goes before all other requests."""
    client = Client(engine)
    engine.control.stall = True
    probes = [asyncio.create_task(client.get("/health_generate")) for _ in range(20)]
    async with asyncio.timeout(DEADLINE_S):
        while not engine.control.requests:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engine.control.requests) == 1
        engine.manager.abort_all()
        answers = await asyncio.gather(*probes)

    assert len({answer.status_code for answer in answers}) == 1
    engine.control.stall = False
    assert (await client.get("/health_generate")).status_code == 200


async def test_what_held_the_event_loop_is_counted(client):
    stall = LoopStall(1.5, "sylvan.api.strict_json.decode_json", "json.decoder.JSONDecoder.decode")

    client.context.accounts.loop_stalled(stall)
    text = (await client.get("/metrics")).text

    label = 'function="sylvan.api.strict_json.decode_json"'
    assert f"sylvan:event_loop_holds_total{{{label}}} 1.0" in text
    assert f"sylvan:event_loop_held_seconds_total{{{label}}} 1.5" in text
